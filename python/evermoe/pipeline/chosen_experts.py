"""Chooses the experts that each version sends to other nodes, and counts the tokens that recoveries lose (MoEtion).

    version v   at risk of all stages ─ gather ─ most_at_risk ─┬─ chosen: captured, sent to their holders
                                                               └─ the others: captured by their own ranks alone
    failure     all units of one version are left: all ranks go back to it, and lose nothing
                else they take the newest version of all other units, and lost experts from their newest copies

All ranks of a stage count the same tokens, since the dispatcher gathers them. The counts are part of the unit with the
training loop's state, so that they are restored with it. Survivors take their own experts: as they
are if no rank goes back, else from their own memory, which has all experts of each version.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from evermoe.comm.gather import gather_json
from evermoe.comm.membership import MembershipManager
from evermoe.copies.loss_ledger import LossLedger
from evermoe.copies.selection import most_at_risk
from evermoe.copies.snapshot.bundles import Bundle
from evermoe.copies.snapshot.window_plan import WindowPlanner
from evermoe.pipeline.pipeline_config import PipelineConfig
from evermoe.pipeline.stages import StageRank, StageState
from evermoe.planning import budgets
from evermoe.planning.recovery import Lagging
from evermoe.presets import Pec
from evermoe.recovery.report import Outcome
from evermoe.state.unit import expert_unit


class ChosenExperts:
    """The choice of each version, the same on all ranks, and the ledger of this rank's stage.

    Without a choice (`PipelineConfig.chooses_experts`) each version has all experts, and nothing is ever lost.

    Args:
        options: of the pipeline.
        state: of the stage.
        membership: all ranks.
        planner: plans without the experts that stay, and knows how much a step can send.
    """

    def __init__(
        self, options: PipelineConfig, state: StageState, membership: MembershipManager, planner: WindowPlanner
    ) -> None:
        self._options, self._state, self._membership, self._planner = options, state, membership, planner
        self._are_chosen = options.chooses_experts
        self.ledger = LossLedger(state, Pec(), records_copies=self._are_chosen)
        self._numbers: dict[str, int] = {}
        """By expert of all stages that others keep copies of, the number of its bundle."""
        self._expert_bytes = self._all_bytes = self._other_bytes = 0
        """Bytes that a version sends of the largest expert, of all experts, and of all other units."""

    @property
    def lagging(self) -> Lagging:
        """Whether a recovery may take older versions of experts: only if no version has all units."""
        return "if needed" if self._are_chosen else "never"

    def arrange(self, planned: Sequence[Bundle]) -> list[Bundle]:
        """Divide the bundles of a plan, one for each expert; without a choice the plan stays."""
        if not self._are_chosen:
            return list(planned)
        experts = {*self._state.catalog.experts()}
        return [
            part
            for bundle in planned
            for part in bundle.divided(
                [unit for unit in bundle.units if unit not in experts],
                *([unit] for unit in bundle.units if unit in experts),
            )
        ]

    def keep(self, kept: Sequence[Bundle]) -> None:
        """Choose from now on among the experts that have room on other nodes.

        Args:
            kept: bundles, as `SnapshotStore.replace_arenas` returns them.
        """
        if not self._are_chosen:
            return
        catalog = self._state.catalog
        experts, travels = {*catalog.experts()}, {n: each for n, each in enumerate(kept) if len(each.holders) > 1}
        self._numbers = {each.units[0]: n for n, each in travels.items() if each.units[0] in experts}
        nbytes = {
            n: (len(each.holders) - 1) * sum(catalog.by_name[unit].nbytes for unit in each.units)
            for n, each in travels.items()
        }
        sent = [nbytes[number] for number in self._numbers.values()]
        self._expert_bytes, self._all_bytes = max(sent, default=0), sum(sent)
        self._other_bytes = sum(nbytes.values()) - self._all_bytes
        self._planner.versions.optional = frozenset(self._numbers.values())

    def taken(self, step: int, *, is_repeated: bool) -> None:
        """Count the tokens of the latest step.

        Args:
            step: steps taken.
            is_repeated: whether this rank took it before and only sends again. Its tokens come with the state.
        """
        if not self._are_chosen:
            return
        if not is_repeated:
            self.ledger.add_step(step)
        elif self._state.is_of_version:
            self.ledger.record_recovery(step, {})

    def choose(self, version: int) -> Collection[int]:
        """Choose the bundles that stay with their primaries in a version, which begins now. Collective.

        Returns:
            Their numbers.

        Raises:
            PeerLost: a rank is lost.
        """
        if not self._numbers:
            return ()
        ledger, layers = self.ledger.selection, self._state.layers
        rows = [] if ledger is None else ledger.at_risk.tolist()
        mine = {
            path: [n if expert_unit(path, e) in self._numbers else 0 for e, n in enumerate(row[: layer.num_experts])]
            for row, (path, layer) in zip(rows, layers.items(), strict=True)
        }
        at_risk: dict[str, list[int]] = {}
        for of_rank in gather_json(self._membership.trainer_group, mine):
            at_risk |= of_rank
        budget = self._budget()
        chosen = {*self._numbers}
        if budget < self._all_bytes:  # else all: an update also changes experts without tokens
            chosen = most_at_risk(at_risk, budget, self._expert_bytes)
        self._note(chosen, version)
        return frozenset(number for unit, number in self._numbers.items() if unit not in chosen)

    def protected(self, version: int) -> None:
        """Record that all copies of a recovery's plan are complete, at this version."""
        if self._are_chosen:
            self._note(self._numbers, version)

    def _note(self, units: Collection[str], version: int) -> None:
        mine = self._state.own.experts()
        self.ledger.record_copies([unit for unit in mine if unit in units], version)
        self.ledger.record_local_copies(mine, version)

    def _budget(self) -> int:
        """Bytes that experts may take in a version: bandwidth × time of its steps (MoEtion, Algorithm 1).

        Measured, less the bytes of other units, and enough for one expert. Before a measurement see `budgets`.
        """
        steps, given = self._planner.versions.steps, self._options.remote_bytes_per_step
        if given is not None:
            return given * steps
        measured = self._planner.budgets.remote
        if measured is None:
            return budgets.remote_bytes_per_step(self._expert_bytes, self._all_bytes) * steps
        return max(self._expert_bytes, measured * steps - self._other_bytes)

    def count_losses(self, layout: Sequence[StageRank], outcome: Outcome, before: int | None) -> None:
        """Counts in an outcome the tokens that its stale experts have lost. Collective.

        Args:
            layout: by rank.
            outcome: of the recovery in progress.
            before: version of this rank's state before it; None if this rank was not part of the running job.

        Raises:
            PeerLost: a rank is lost.
        """
        if not self._are_chosen:
            return
        ledger, lost = self.ledger, dict[str, int]()
        if self._state.layers:
            stale = {unit: at for unit, at in outcome.stale.items() if unit in self._state.own.by_name}
            lost = ledger.agree_on_lost(self._membership.side_group, stale, outcome.version, before)
        reports = gather_json(self._membership.trainer_group, [lost, ledger.plt_L.tolist()])
        firsts = {stage_rank.stage: rank for rank, stage_rank in reversed(list(enumerate(layout)))}
        of_stages = [reports[rank] for _, rank in sorted(firsts.items())]
        outcome.lost_tokens = {unit: tokens for found, _ in of_stages for unit, tokens in found.items()}
        portions = [portion for _, found in of_stages for portion in found]
        outcome.mtl = float(sum(portions))
        outcome.plt = outcome.mtl / max(1, len(portions))
