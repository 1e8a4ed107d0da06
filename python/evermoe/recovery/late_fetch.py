"""Units that are fetched in two parts: weights while training waits, and the optimizer's state during the next step."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from evermoe.comm.group import Group
from evermoe.errors import PeerLost
from evermoe.recovery.fetch import Fetch, Transfer
from evermoe.recovery.survey import ACTIVE, Holding
from evermoe.state.training_state import TrainingState


class LateFetch:
    """The transfers of units that members train, whose optimizer state follows their weights.

    A copy is sent as one: only then it is known whether its bytes are right.

    Args:
        group: all members.
        state: this member's units.
        promised: all transfers of the recovery, and what their sources say that they have; none to move all at once.
    """

    def __init__(self, group: Group, state: TrainingState, promised: Mapping[Transfer, Holding]) -> None:
        self._group, self._state, self._by_name = group, state, state.catalog.by_name
        away = [each for each in promised if each.source != each.destination]
        at_once = {each.unit for each in away if each.kind != ACTIVE}
        self._transfers = [each for each in away if each.unit not in at_once and self._by_name[each.unit].state_nbytes]
        self._is_late = set(self._transfers)
        self._digests = {each.unit: promised[each].digest for each in self._transfers}
        self._weights: dict[str, Tensor] = {}

    def nbytes(self, transfer: Transfer) -> int:
        """Bytes that a transfer moves while training waits."""
        unit = self._by_name[transfer.unit]
        return unit.nbytes - (unit.state_nbytes if transfer in self._is_late else 0)

    def keep(self, fetched: Mapping[str, Tensor]) -> set[str]:
        """Keep the weights that this member has got, to compare the unit's digest; names of these units."""
        mine = {each.unit for each in self._transfers if each.destination == self._group.rank}
        self._weights = {unit: fetched[unit] for unit in mine}
        return mine

    @property
    def late_bytes(self) -> int:
        """Bytes that this member is still to get."""
        return sum(self._by_name[unit].state_nbytes for unit in self._weights)

    def begin(self, version: int) -> None:
        """Begins to move the optimizer's state, which is that of `version`, in a thread; see `TrainingState.late`."""
        if not self._transfers:
            return
        late, by_name, weights = self._state.late, self._by_name, self._weights

        def take(unit: str, state: Tensor) -> None:
            if by_name[unit].digest_of(weights.pop(unit), state) != self._digests[unit]:
                raise PeerLost(f"{unit} has arrived with other bytes than were sent: check the network")
            late.take(by_name[unit], state)

        fetch = Fetch(
            self._group,
            lambda transfer: by_name[transfer.unit].state_nbytes,
            lambda transfer, out: late.read(by_name[transfer.unit], version, out),
        )
        late.begin(list(weights), fetch.as_task(self._transfers, take), fetch.complete)
