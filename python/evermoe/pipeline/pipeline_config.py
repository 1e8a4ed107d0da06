"""Arguments of a pipeline's session, checked together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evermoe.config.copies import CopyConfig
from evermoe.config.membership import Membership
from evermoe.config.placement import Placement
from evermoe.options import Options, option
from evermoe.presets import PipelineMoetion, PipelineVersions


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Options):
    """Arguments of a pipeline's session. `PipelineSession` documents them."""

    stage: int = option(least=0)
    stages: int = option(least=2)
    data_parallel: int = option(0, least=0)
    data_parallel_size: int = option(1, least=1)
    versions: PipelineVersions
    """The preset, with its options."""
    copies: CopyConfig
    """The same preset, and the number of nodes that hold each unit."""
    membership: Membership
    expert_parallel: bool | Placement = option(False, shared=True)
    localised: bool = option(True, shared=True)
    max_grad_norm: float | None = option(None, shared=True, above=0)
    on_nonfinite: Literal["error", "skip"] = option("error", shared=True)
    seed: int = option(0, least=0, shared=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage >= self.stages:
            raise ValueError(f"expected stage < {self.stages}, the number of stages, got {self.stage}")
        if self.data_parallel >= self.data_parallel_size:
            raise ValueError(f"expected data_parallel < {self.data_parallel_size}, got {self.data_parallel}")
        if self.membership.lighthouse is None:
            raise ValueError(
                "the ranks of a pipeline meet at a Lighthouse: expected membership.lighthouse (EVERMOE_LIGHTHOUSE) to "
                "be its address, got None"
            )
        if self.membership.role != "train":
            raise ValueError(
                "each process of a pipeline has a rank of its own: expected role (EVERMOE_ROLE) to be train, got "
                f"{self.membership.role}"
            )
        if self.expert_selection == "budget" and not self.expert_parallel:
            raise ValueError(
                'expert_selection="budget" chooses among experts that each have one rank: expected '
                "expert_parallel=True, got False"
            )
        if self.placement is not None and self.placement.rebalance_interval and self.versions.sparse:
            raise ValueError(
                "sparse=True divides the units of each rank into slices, which must stay the same: expected "
                f"expert_parallel with rebalance_interval=0, got {self.placement.rebalance_interval}"
            )
        if self.versions.sparse and not self.localised:
            raise ValueError(
                "sparse=True needs localised=True: a slice is of another step than the others, and becomes a state by "
                "computing the steps between again, from what the neighbours of a stage have logged"
            )

    def shared(self) -> dict[str, str]:
        """Return the options that must be the same on all ranks, as text by name."""
        joining = {f"membership.{name}": value for name, value in self.membership.shared().items()}
        own = super().shared() | self.copies.shared() | joining
        return own | {"on_lost": "missing" if self.membership.on_lost is None else "given"}

    @property
    def expert_selection(self) -> Literal["budget", "all"] | None:
        """Choice of the experts that a version sends; None for the default."""
        return self.versions.expert_selection if isinstance(self.versions, PipelineMoetion) else None

    @property
    def remote_bytes_per_step(self) -> int | None:
        """Bytes of experts that all ranks together send in a step; None to measure them."""
        return self.versions.remote_bytes_per_step if isinstance(self.versions, PipelineMoetion) else None

    @property
    def replay(self) -> bool:
        """Whether versions are sent as the steps that lead to them."""
        return isinstance(self.versions, PipelineMoetion) and self.versions.replay

    @property
    def chooses_experts(self) -> bool:
        """Whether a version sends only some of the experts to other nodes."""
        may_choose = isinstance(self.versions, PipelineMoetion) and not self.versions.sparse
        return may_choose and bool(self.expert_parallel) and self.expert_selection != "all"

    @property
    def placement(self) -> Placement | None:
        """Options of replicas, with the choices of the preset; None if each expert has one rank."""
        if not isinstance(self.expert_parallel, Placement):
            return None
        return self.expert_parallel.resolved(self.copies.choices, self.copies.replication)

    @property
    def place(self) -> int | None:
        """Number of this rank among those that divide their stage's experts; None if each rank has all of them."""
        return self.data_parallel if self.expert_parallel else None

    @property
    def rank(self) -> int:
        """Number of this rank in the pipeline."""
        return self.stage * self.data_parallel_size + self.data_parallel

    @property
    def size(self) -> int:
        """Number of ranks in the pipeline."""
        return self.stages * self.data_parallel_size
