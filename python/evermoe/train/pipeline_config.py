"""Options of a pipeline's session."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from evermoe.config.copies import CopyConfig
from evermoe.config.membership import Membership
from evermoe.events import MemberLost
from evermoe.memory_folder import DEFAULT
from evermoe.options import MAX_SECONDS, MIN_SECONDS, Options, option
from evermoe.presets import BY_NAME, IdleWindows, SnapshotMemory
from evermoe.train.stages import PipelinePreset


@dataclass(frozen=True, kw_only=True)
class PipelineConfig(Options):
    """How a pipeline's session runs."""

    stage: int = option(least=0)
    """Number of this rank's stage."""
    stages: int = option(least=2)
    """Number of stages, 2 or more; virtual ones do not count."""
    data_parallel: int = option(least=0)
    """This rank's data-parallel coordinate."""
    data_parallel_size: int = option(least=1)
    """Number of ranks of each stage."""
    lighthouse: str
    """Address of the job's Lighthouse."""
    job: str = option(is_name=True)
    """Name of the job, the same for all ranks."""
    preset: PipelinePreset = "baft"
    """`baft` copies all units to the `copies - 1` nodes before this one in the pipeline, in which the last node comes
    before the first; `moetion` only what fewer than `copies` nodes hold anyway."""
    copies: int = option(2, least=0)
    """Nodes that are to hold each unit, those that train on it included (`moetion`), or its own and those before it
    (`baft`)."""
    snapshot_interval: int | None = option(None, least=1)
    """Steps between two versions that are copied, each over so many steps; None: as few as the bubbles need for it, or
    where these have too little room, as many as lose the least time; 1 until they are known. A failure goes back by
    twice as many, less one, at most."""
    snapshot_memory: SnapshotMemory = "host"
    """Where a snapshot of a stage on a GPU is made: as of `Session`."""
    node: str | None = option(None, is_name=True)
    """The machine whose memory dies as one; default: the host's name."""
    memory_dir: str = DEFAULT
    """Folder of the named shared memory."""
    copy_buffer_bytes: int = option(4 << 20, least=1)
    """Bytes that travel at once, at most."""
    profile_steps: int = option(20, least=0)
    """Steps that are recorded to find the bubbles; until then, and with 0, copies travel at any time."""
    profile_interval: int = option(1000, least=1)
    """Steps between two such profiles; another one follows each recovery."""
    max_grad_norm: float | None = option(None, shared=True, above=0)
    """Clips the gradient's global norm, over all stages; None for no clipping."""
    on_nonfinite: Literal["error", "skip"] = option("error", shared=True)
    """What a gradient of infinity or NaN on any rank does: `error` ends the job with `NonFiniteLoss` on all of them,
    the state unchanged; `skip` makes all of them leave out that step's update."""
    expert_parallel: bool = option(False, shared=True)
    """Whether the ranks of a stage divide the experts of its MoE layers (`evermoe.MoE`, `evermoe.Experts`) among them:
    tokens travel to the ranks of their experts. False: each rank has all experts."""
    expert_selection: Literal["budget", "all"] | None = option(None, shared=True)
    """Experts that a version of `moetion` has on other nodes, where ranks divide them (`expert_parallel`). `budget`:
    those with the most tokens since their last copy, as many as `remote_bytes_per_step` allows; if a rank's node is
    lost, its experts lose what they have learnt since their copies, unless one version has all. `all`: all of them, so
    that nothing is lost. None: `budget` where it can be, for `moetion` with `expert_parallel` and without `sparse`."""
    remote_bytes_per_step: int | None = option(None, shared=True, least=0)
    """What `budget` may send of experts in a step, all ranks together; None: bandwidth × time of a step, as they were
    measured, less what other units take, and until then an eighth of the experts' state."""
    localised: bool = option(True, shared=True)
    """Whether ranks log what they send to other stages, so that after a failure only those that lost their state
    compute again. The log has the activations and gradients at a stage's borders, of two steps (2 n where a version
    takes n), in host memory."""
    sparse: bool = option(False, shared=True)
    """Whether a version is *sparse*: of `snapshot_interval` slices, of which each step captures one, with the weights
    of those to come. No step captures all of the state; a lost stage gets a dense one by computing the steps since
    again, from what its neighbours have logged. With `snapshot_interval=None` of as many slices, up to 8, as fit into
    the bubbles, once these are known: for that all ranks meet once as after a loss. Needs `localised`."""
    replay: bool = option(False, shared=True)
    """Whether, with `moetion`, a version travels as the step that leads to it where its keeper has the version before:
    the gradients that the optimizer saw, with which the keeper repeats the step (Algorithm 3). Where an optimizer's
    steps cannot be repeated to the bit, state travels, and a warning says so. Each step is then a version, and no unit
    is cut. Not with `sparse` or another `snapshot_interval` than 1."""
    seed: int = option(0, least=0, shared=True)
    """Of random numbers: torch's generator is seeded from it, the step and the rank when a step begins, and in
    `step.run` for each microbatch, so that one which is computed again draws the same."""
    hang_timeout: float = option(30.0, least=MIN_SECONDS, most=MAX_SECONDS)
    """Seconds that a vote, and any wait in torch's groups, may last: more than a rank is ever idle."""
    quorum_timeout: float = option(300.0, least=MIN_SECONDS, most=MAX_SECONDS)
    """Seconds that `recover` waits for all ranks to be there."""
    on_lost: str | Callable[[MemberLost], object] | None = None
    """Is called when a rank is lost, once for each loss in the whole job, while the others wait for another process in
    its place: a shell command, or a function of the event `MemberLost`. On all ranks or none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stage >= self.stages:
            raise ValueError(f"expected stage < {self.stages}, the number of stages, got {self.stage}")
        if self.data_parallel >= self.data_parallel_size:
            raise ValueError(f"expected data_parallel < {self.data_parallel_size}, got {self.data_parallel}")

        if self.expert_selection == "budget" and not self._may_choose:
            raise ValueError(
                'expert_selection="budget" chooses among experts that each have one rank, in whole versions, as moetion'
                f" does: expected preset moetion, expert_parallel=True and sparse=False, got preset {self.preset}, "
                f"expert_parallel={self.expert_parallel} and sparse={self.sparse}"
            )
        if self.replay and (not self.copy_options().choices.selects_by_budget or self.sparse):
            raise ValueError(
                "replay=True is MoEtion's, of whole versions: expected preset moetion and sparse=False, got preset "
                f"{self.preset} and sparse={self.sparse}"
            )
        if self.replay and self.snapshot_interval not in (None, 1):
            raise ValueError(
                "replay=True: a step leads from a version to the next: expected snapshot_interval of 1 or None, "
                f"got {self.snapshot_interval}"
            )
        if self.sparse and not self.localised:
            raise ValueError(
                "sparse=True needs localised=True: a slice is of another step than the others, and becomes a state by "
                "computing the steps between again, from what the neighbours of a stage have logged"
            )
        if self.sparse and self.snapshot_interval == 1:
            raise ValueError(
                "sparse=True: expected snapshot_interval of 2 or more, the slices of a version, or None for as many as "
                "the bubbles need, got 1"
            )

    @property
    def _may_choose(self) -> bool:
        return self.copy_options().choices.selects_by_budget and self.expert_parallel and not self.sparse

    @property
    def chooses_experts(self) -> bool:
        """Whether a version has only some of the experts on other nodes."""
        return self._may_choose and self.expert_selection != "all"

    @property
    def place(self) -> int | None:
        """This rank's place among those that divide their stage's experts; None where all have all."""
        return self.data_parallel if self.expert_parallel else None

    @property
    def slices(self) -> int | None:
        """Slices of a version: 1 unless versions are sparse; None for as many as the bubbles need."""
        return self.snapshot_interval if self.sparse else 1

    @property
    def version_steps(self) -> int | None:
        """Steps over which each version is sent; None for as few as the bubbles need."""
        return 1 if self.replay else self.snapshot_interval

    @property
    def rank(self) -> int:
        """This rank's number in the whole pipeline."""
        return self.stage * self.data_parallel_size + self.data_parallel

    @property
    def size(self) -> int:
        """Number of ranks in the whole pipeline."""
        return self.stages * self.data_parallel_size

    def membership_options(self) -> Membership:
        """Options of the rooms that know who is alive."""
        return Membership(
            lighthouse=self.lighthouse,
            job=self.job,
            node=self.node,
            hang_timeout=self.hang_timeout,
            quorum_timeout=self.quorum_timeout,
        )

    def copy_options(self) -> CopyConfig:
        """Options of the rooms that keep copies."""
        preset = BY_NAME[self.preset](snapshot_memory=self.snapshot_memory)
        return CopyConfig(preset=preset, replication=self.copies)

    def window_options(self) -> IdleWindows:
        """Options of the rooms that find idle windows."""
        return IdleWindows(
            copy_buffer_bytes=self.copy_buffer_bytes,
            profile_steps=self.profile_steps,
            profile_interval=self.profile_interval,
        )
