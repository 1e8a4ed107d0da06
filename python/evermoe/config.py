"""How a session runs: all its options in one, and the environment variables that stand in for some."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

from evermoe.comm.membership import ROLES, MembershipOptions
from evermoe.options import SHARED
from evermoe.placement import PlacementOptions
from evermoe.planning import PlacementPolicy
from evermoe.protection import ProtectionOptions


@dataclass(frozen=True, kw_only=True)
class SessionConfig(MembershipOptions, ProtectionOptions, PlacementOptions):
    """How a session runs. Arguments win over `EVERMOE_*` variables, those over the defaults."""

    memory_dir: str | None = None
    """Folder of named shared memory (EVERMOE_MEMORY_DIR; default /dev/shm)."""
    max_grad_norm: float | None = field(default=None, metadata=SHARED)
    """Clips the gradient's global norm, over all ranks' experts; None for no clipping."""
    seed: int | None = 0
    """Seeds torch's generator from (seed, step, rank) at each step: a repeated step draws the same. None: not."""

    @property
    def replicas(self) -> int:
        """Active replicas of each expert that are wanted."""
        if self.min_replicas is None and self.choices.active_copies:
            return max(1, self.copies)
        return super().replicas

    @property
    def placement_policy(self) -> PlacementPolicy:
        """Policy for which rank holds which expert."""
        return self.placement or self.choices.placement or super().placement_policy


def with_environment(config: SessionConfig) -> SessionConfig:
    """Fills what was not given from `EVERMOE_*` variables, where they are set."""
    found: dict[str, Any] = {}
    for name in ("lighthouse", "job", "node", "address", "memory_dir"):
        if getattr(config, name) is None and os.environ.get(f"EVERMOE_{name.upper()}"):
            found[name] = os.environ[f"EVERMOE_{name.upper()}"]
    if os.environ.get("EVERMOE_ROLE"):
        if os.environ["EVERMOE_ROLE"] not in ROLES:
            raise ValueError(f"EVERMOE_ROLE: expected one of {', '.join(ROLES)}, got {os.environ['EVERMOE_ROLE']!r}")
        found["role"] = os.environ["EVERMOE_ROLE"]
    if config.members is None and os.environ.get("EVERMOE_MEMBERS"):
        try:
            found["members"] = int(os.environ["EVERMOE_MEMBERS"])
        except ValueError:
            raise ValueError(f"EVERMOE_MEMBERS: expected a number, got {os.environ['EVERMOE_MEMBERS']!r}") from None
    return replace(config, **found)
