"""Counts the tokens that experts received since their latest copies, and the tokens that failures have cost.

The counts are the same on all members, as all count the same tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evermoe.comm.gather import gather_json, share_json
from evermoe.comm.group import Group
from evermoe.planning import presets
from evermoe.planning.ledger import TokenLedger
from evermoe.presets import Pec
from evermoe.state.copy_marks import CHECKPOINT, LOCAL, SAVED, Places
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit
from evermoe.state.version import step_of, version_of

_NOTHING: Mapping[str, int] = MappingProxyType({})
LATEST_STEPS = 16
"""Number of latest steps whose totals are kept."""
BOOST = 1.1
"""Weight of the load of experts that lost tokens, until they have received as many again (MoEtion)."""


class LossLedger:
    """Counts the tokens of all experts in the steps that were taken, in `ExpertLoad.tokens`.

    The portion of lost tokens (PLT, of PEC / MoC-System) is the number of tokens in the updates that recoveries gave
    up, divided by all tokens of the run so far. It is computed per layer and averaged over layers. The tokens that an
    expert has processed are those it received without those it lost. `CopyMarks` records the processed tokens in each
    of an expert's latest copies.

    Args:
        state: holds the tokens.
        options: number of experts that are copied at a time.
        records_copies: False if no recovery ever takes an expert at an older version than the rest.
    """

    def __init__(self, state: TrainingState, options: Pec, *, records_copies: bool = True) -> None:
        self._state, self.marks, self._records_copies = state, state.expert_load.marks, records_copies
        self._layers = {path: layer.num_experts for path, layer in state.layers.items()}
        self._latest: deque[tuple[int, NDArray[np.int64]]] = deque(maxlen=LATEST_STEPS)
        """The latest steps, with [L, E] processed tokens after each."""
        most = max(self._layers.values(), default=0)
        each = presets.levels(max(most, 1), options.experts_per_snapshot, options.experts_per_save)
        self.selection, self.local = (
            TokenLedger(
                len(self._layers), most, experts_per_layer=k, max_lost_token_fraction=options.max_lost_token_fraction
            )
            if most
            else None
            for k in (each.save, each.snapshot)
        )
        """Tokens at risk since the latest copy: on another node or in the store, and on the expert's own node."""
        self._places = {
            expert_unit(path, expert): (row, expert)
            for row, (path, number) in enumerate(self._layers.items())
            for expert in range(number)
        }

    @property
    def _levels(self) -> list[tuple[int, TokenLedger]]:
        """Levels of copies, each with its ledger; none without MoE layers."""
        return [(level, ledger) for level, ledger in ((SAVED, self.selection), (LOCAL, self.local)) if ledger]

    @property
    def total_LE(self) -> NDArray[np.int64]:
        """[L, E] tokens of the run so far. They are part of the state, so a recovery restores them with it."""
        return self._state.expert_load.tokens[0].numpy()

    @property
    def lost_LE(self) -> NDArray[np.int64]:
        """[L, E] tokens lost so far."""
        return self._state.expert_load.tokens[1].numpy()

    @property
    def boost_until_LE(self) -> NDArray[np.int64]:
        """[L, E] totals at which experts that lost tokens will have received as many again; 0 for all others."""
        return self._state.expert_load.tokens[2].numpy()

    @property
    def plt_L(self) -> NDArray[np.float64]:
        """[L] portions of lost tokens (PLT) in the run so far."""
        return self.selection.plt_lost if self.selection else np.zeros(0)

    @property
    def plt(self) -> float:
        """Portion of lost tokens (PLT) in the run so far, averaged over layers."""
        return self.selection.plt if self.selection else 0.0

    @property
    def processed_LE(self) -> NDArray[np.int64]:
        """[L, E] tokens received and not lost."""
        return self.total_LE - self.lost_LE

    def add_step(self, step: int) -> None:
        """Add the tokens that the layers counted in the step that was just taken; `step` steps are taken with it."""
        self.marks.fold()
        counts_LE = self._state.expert_load.counts()
        total_LE, boost_until_LE = self.total_LE, self.boost_until_LE
        total_LE += counts_LE
        boost_until_LE[total_LE >= boost_until_LE] = 0
        self._latest.append((step, self.processed_LE))
        for _, ledger in self._levels:
            ledger.add(counts_LE)

    # ---- copies

    def record_copies(self, units: Iterable[str], version: int, behind: Collection[str] = ()) -> None:
        """Record copies of these units on other nodes or in the store, in their current state: that of `version`.

        Copies of the units in `behind` are one step older, at the previous version.
        """
        self._record(SAVED, units, version, behind)

    def record_local_copies(self, units: Iterable[str], version: int) -> None:
        """Record copies of these units in the memory of their own nodes, in their current state: that of `version`."""
        self._record(LOCAL, units, version)

    def record_checkpoint(self, version: int) -> None:
        """Record a checkpoint of all units in their current state: that of `version`."""
        self._record(CHECKPOINT, self._places, version)

    def _record(self, level: int, units: Iterable[str], version: int, behind: Collection[str] = ()) -> None:
        if not self._records_copies:
            return
        experts = [unit for unit in units if unit in self._places]
        older, newer_LE = self._at(unit for unit in experts if unit in behind), None
        if older.size:
            newer_LE = np.zeros_like(self.total_LE)
            newer_LE[tuple(older)] = self._state.expert_load.counts()[tuple(older)]
            self.marks.add(level, older, version - 1, self.processed_LE - newer_LE)
        current = self._at(unit for unit in experts if unit not in behind)
        self.marks.add(level, current, version, self.processed_LE)
        ledger = dict(self._levels).get(level)
        if ledger is not None:
            chosen: list[list[int]] = [[] for _ in self._layers]
            for unit in experts:
                row, expert = self._places[unit]
                chosen[row].append(expert)
            ledger.copied(chosen, newer_LE)

    def drop_copies(self, units: Collection[str], version: int) -> None:
        """Remove recorded copies of this version: they were begun and never completed."""
        self.marks.drop(SAVED, self._at(units), version)
        self._restore_ledgers()

    def _at(self, units: Iterable[str]) -> Places:
        """Return the [2, n] layers and indices of experts."""
        return np.array([self._places[unit] for unit in units], np.int64).reshape(-1, 2).T

    # ---- recoveries

    def count_lost(self, stale: Mapping[str, int]) -> dict[str, int]:
        """Return the tokens that each expert loses if it returns to its copy of the given version.

        If this member has no record of the copy, the number is an upper bound.

        Example: an expert received 5, 7 and 3 tokens in steps 0 to 2 and was copied after step 0. A recovery from that
        copy loses 10 of its 15 tokens. After one more step with 4 tokens, another recovery from it loses these 4.
        """
        places, versions = self._at(stale), np.array(list(stale.values()), np.int64)
        tokens, is_known = self.marks.tokens_at(places, versions)
        for step, tokens_LE in self._latest:
            counts = ~is_known & (step <= versions % version_of(1, 0))
            tokens = np.where(counts, np.maximum(tokens, tokens_LE[tuple(places)]), tokens)
        lost = np.maximum(0, self.processed_LE[tuple(places)] - tokens)
        return dict(zip(stale, lost.tolist(), strict=True))

    def agree_on_lost(self, group: Group, stale: Mapping[str, int], version: int, before: int | None) -> dict[str, int]:
        """Return the tokens that each stale expert has lost, as counted by the most advanced member; collective.

        All members resume with that member's ledger. Their own may differ: a recovery that failed may have counted on
        some members only, and some members may have begun copies of the version.

        Args:
            group: all members; those that train come first.
            stale: experts that were taken at older versions, with these versions.
            version: version from which all members resume.
            before: version of this member's state before the recovery; None if it belonged to no running job.
        """
        mine = None if before is None else [before, self.marks.pending]
        known = [(found, -rank) for rank, found in enumerate(gather_json(group, mine)) if found is not None]
        source = -max(known)[1] if known else 0  # any member that trains has the state of the version
        report = None
        if group.rank == source:
            tokens = self._state.expert_load.tokens.tolist()
            report = {"lost": self.count_lost(stale), "tokens": tokens, "ledger": self.to_fields()}
        found = share_json(group, report, source)
        self._state.expert_load.tokens.copy_(torch.tensor(found["tokens"]))  # a replica node has no tokens of its own
        self.load_fields(found["ledger"])
        reached = step_of(max(known)[0][0]) if known else None
        if reached != step_of(version):  # the copies that members resume from remain
            current = self._at(unit for unit in self._places if unit not in stale)
            self.marks.add(CHECKPOINT, current, version, self.processed_LE)
        self.record_recovery(step_of(version), found["lost"], stale)
        return found["lost"]

    def record_recovery(self, step: int, lost: Mapping[str, int], stale: Mapping[str, int] = _NOTHING) -> None:
        """Record a recovery after which all members resume; the same on all members.

        Args:
            step: number of steps taken in the state from which they resume.
            lost: tokens lost by experts that resume from older copies.
            stale: versions of these copies.
        """
        self.marks.undo(step)
        if stale:  # marks are part of the state, which gets a new version now
            self.marks.undo_experts(self._at(stale), np.array(list(stale.values()), np.int64))
        self._restore_ledgers()  # the K of a lost process is part of the state, as its losses are
        for unit, tokens in lost.items():
            row, expert = self._places[unit]
            self.lost_LE[row, expert] += tokens
            self.boost_until_LE[row, expert] = self.total_LE[row, expert] + tokens
        self._latest.clear()
        self._latest.append((step, self.processed_LE))
        if lost:
            self._restore_ledgers()
            for level, ledger in self._levels:
                if any(lost.values()):
                    ledger.adapt_k()
                self.marks.each[level] = ledger.experts_per_layer

    def _restore_ledgers(self) -> None:
        """Restore tokens seen, lost and at risk from the state and the marks of the newest copies."""
        for level, ledger in self._levels:
            at_risk_LE = np.maximum(0, self.processed_LE - self.marks.marks(level)[0, ..., 1])
            ledger.restore(self.total_LE, self.lost_LE, at_risk_LE, int(self.marks.each[level]))

    def boost_factors(self) -> dict[str, list[float]]:
        """Return factors of the experts' loads for the allotment of replicas, by layer; layers of ones are left out."""
        return {
            path: np.where(row[:number] > 0, BOOST, 1.0).tolist()
            for row, (path, number) in zip(self.boost_until_LE, self._layers.items(), strict=True)
            if row.any()
        }

    def to_fields(self) -> dict[str, Any]:
        """Return the counts that are not part of the state as JSON values, for members that join."""
        return {"marks": self.marks.to_fields(), "ledgers": [ledger.to_json() for _, ledger in self._levels]}

    def load_fields(self, fields: Mapping[str, Any]) -> None:
        """Replace these counts by those of another member, from its `to_fields`."""
        self.marks.load_fields(fields["marks"])
        if self._levels:
            self.selection, self.local = map(TokenLedger.from_json, fields["ledgers"])
