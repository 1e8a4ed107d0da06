"""Options that decide which rank trains which expert."""

from __future__ import annotations

from dataclasses import dataclass, replace

from evermoe.options import Options, option
from evermoe.planning.placement import PlacementPolicy
from evermoe.planning.presets import Preset


@dataclass(frozen=True, kw_only=True)
class Placement(Options):
    """Decide which rank trains which expert."""

    expert_slots: int | None = option(None, shared=True, least=1)
    """Replicas of experts per rank and layer; more where the experts need it. Default: the fewest possible plus one."""
    min_replicas: int | None = option(None, shared=True, least=1)
    """Ranks that train each expert, where `expert_slots` allow it. Default: 1, and `replication` with the preset
    `lazarus`."""
    policy: PlacementPolicy | None = option(None, shared=True, flag="placement")
    """Policy of `evermoe.planning.place` that assigns experts to ranks. Ranks of one node fail together. Default: the
    preset's."""
    failures: int | None = option(None, shared=True, least=1, flag="placement-failures")
    """Number of nodes that fail at once, for which the policy weighs survival; of fewer nodes all but one. Default: the
    fewest replicas of any expert; for `balanced` at least 2."""
    rebalance_interval: int = option(100, shared=True, least=0)
    """Steps between checks whether the load has shifted so far that experts should move; 0 for no checks."""

    def resolved(self, preset: Preset, replication: int) -> Placement:
        """Return these options with the preset's choices where none is made."""
        return replace(
            self,
            min_replicas=preset.replicas(replication, self.min_replicas),
            policy=self.policy or preset.placement,
        )
