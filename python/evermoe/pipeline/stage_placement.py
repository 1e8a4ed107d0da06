"""Placement of each stage's experts on its ranks: replicas by load, the same on all ranks.

    start              replicas for an even load
    step k · n begins  load of each stage ─ gather ─ placement of step k · n ─ all ranks meet, and experts move
    failure            all ranks go back to a version ─ placement of that version's step

Steps that are computed again have the placement, and so the bits, of the first time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from evermoe.comm.collectives import ExpertReducer
from evermoe.comm.gather import gather_json, share_json
from evermoe.comm.membership import MembershipManager
from evermoe.config.placement import Placement
from evermoe.pipeline.border_log import LoggedStep
from evermoe.pipeline.pipeline_config import PipelineConfig
from evermoe.pipeline.stages import StageRank, StageState
from evermoe.planning.placement import FewerReplicas
from evermoe.session import gradients
from evermoe.state.placement import LayerPlacements, even_division, keep_in_place, place_layers, rebalanced
from evermoe.state.unit import expert_unit


class StagePlacement:
    """The placement of each step, and the sums of gradients over the replicas of an expert.

    Without `PipelineConfig.placement` the experts of a layer are divided evenly, once, or not at all.

    Args:
        options: of the pipeline.
        state: of the stage.
        membership: all ranks; its side group has those of the stage.
    """

    def __init__(self, options: PipelineConfig, state: StageState, membership: MembershipManager) -> None:
        self._options, self._state, self._membership = options, state, membership
        self._replicas = options.placement
        """Options of replicas; None if each expert has one rank."""
        self.layout: list[StageRank] = []
        """Report of each rank about itself, by rank, with the experts that it trains; empty before the first recovery.
        """
        self._placements: dict[int, LayerPlacements] = {}
        """Of the layers of all stages, by the first step that is computed with each: the two newest."""
        self._now: LayerPlacements = {}
        """The one in use."""
        self.decided = -1
        """The newest step at whose beginning the ranks have compared loads; -1 before there is a placement."""
        self._reducer = ExpertReducer([], [], 0)

    # ---- which placement

    def experts(self) -> dict[str, int]:
        """Report `StageRank.experts` of this rank."""
        layers = self._state.layers if self._options.expert_parallel else {}
        return {path: layer.num_experts for path, layer in layers.items()}

    def learn(self, layout: Sequence[StageRank]) -> None:
        """Learn the placements from the rank with the latest decision. Collective.

        Args:
            layout: by rank.

        Raises:
            PeerLost: a rank is lost.
        """
        self.layout = list(layout)
        decided, source = max((stage_rank.decided, -rank) for rank, stage_rank in enumerate(layout))
        if decided < 0:
            decided, self._placements = 0, {0: self._first()}
        else:
            mine = [[step, {path: m.tolist() for path, m in each.items()}] for step, each in self._placements.items()]
            known = share_json(self._membership.trainer_group, mine, -source)
            self._keep({step: {path: np.array(m) for path, m in found.items()} for step, found in known})
        self.decided = decided
        self.choose(max(self._placements))

    def _keep(self, placements: Mapping[int, LayerPlacements]) -> None:
        """Keep the two newest: all copies are newer than the second one's first step."""
        self._placements = {step: placements[step] for step in sorted(placements)[-2:]}

    def _first(self) -> LayerPlacements:
        found, size = LayerPlacements(), self._options.data_parallel_size
        for first in range(0, len(self.layout), size):
            experts, nodes = self.layout[first].experts, [each.node for each in self.layout[first : first + size]]
            if self._replicas is None:
                found |= {path: even_division(number, size) for path, number in experts.items()}
                continue
            load_LE = [[0.0] * number for number in experts.values()]
            nothing = {path: np.zeros((size, number), np.int64) for path, number in experts.items()}
            with warnings.catch_warnings():
                if self._membership.trainer_group.rank:  # one rank warns for all
                    warnings.simplefilter("ignore", FewerReplicas)
                found |= place_layers(experts, load_LE, nothing, nodes, self._replicas, {})
        return found

    def choose(self, step: int) -> LayerPlacements:
        """Choose the placement of a step, and return it."""
        self._now = self._placements[max(at for at in self._placements if at <= max(step, min(self._placements)))]
        self.layout = [replace(stage_rank, own=_trained(stage_rank, self._now)) for stage_rank in self.layout]
        return self._now

    def adopt(self, fetched: Mapping[str, Tensor], leaving: Mapping[str, int]) -> None:
        """Make room in the state for this rank's experts, whose bytes are fetched where it lacks them.

        Args:
            fetched: bytes of units.
            leaving: digests of the units that are given up, and retained.
        """
        mine, place = {path: self._now[path] for path in self.experts()}, self._options.data_parallel
        self._state.place(mine, place, fetched, leaving)
        widths = [self._state.layers[path].weights.shape[1] for path in mine]
        self._reducer = ExpertReducer([*mine.values()], widths, place)

    # ---- steps

    def moves(self, step: int, boosts: Callable[[], Mapping[str, Sequence[float]]]) -> bool:
        """Return whether experts move before a step is computed. All ranks then meet. Collective.

        Args:
            step: that begins.
            boosts: returns factors of the loads of this stage's experts, for some layers.

        Raises:
            PeerLost: a rank is lost.
        """
        options = self._replicas
        if options is None or not options.rebalance_interval or not step or step % options.rebalance_interval:
            return False
        if step > self.decided:
            moved: LayerPlacements = {}
            for found in gather_json(self._membership.trainer_group, self._planned(options, boosts())):
                moved |= {path: np.array(matrix) for path, matrix in found.items()}
            self.decided = step
            if moved:
                self._keep(self._placements | {step: self._now | moved})
        return step in self._placements and self._placements[step] is not self._now

    def _planned(self, options: Placement, boosts: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Plan this stage's layers for their load, for JSON; empty if that is not worth a move."""
        nodes = [stage_rank.node for stage_rank in self.layout if stage_rank.stage == self._options.stage]
        planned, sizes = rebalanced(self._state, nodes, options, boosts) or {}, dict(self._state.own.sizes())
        nbytes = {path: [sizes[expert_unit(path, e)] for e in range(n)] for path, n in self.experts().items()}
        return {path: m.tolist() for path, m in keep_in_place(planned, self._now, nbytes, nodes).items()}

    def sum_replicas(self, past: LoggedStep | None) -> None:
        """Sum the gradients of each expert over its replicas, in place. Collective among the stage's ranks.

        Args:
            past: record of this rank in the step. If a rank is lost meanwhile, it is not used again.

        Raises:
            PeerLost: a rank is lost.
        """
        if self._replicas is None or (past is not None and (past.is_taken or past.has_expert_sums)):
            return
        if past is not None:
            past.is_torn = True
        self._reducer.reduce(gradients.of_experts(self._state), self._membership.side_group)
        if past is not None:
            past.is_torn, past.has_expert_sums = False, True


def _trained(stage_rank: StageRank, placement: LayerPlacements) -> list[str]:
    """Names of the experts that a rank trains."""
    place, experts = stage_rank.data_parallel, stage_rank.experts
    return [expert_unit(path, e) for path in experts for e in np.flatnonzero(placement[path][place]).tolist()]
