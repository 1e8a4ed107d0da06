"""Options of a pipeline's session."""

from __future__ import annotations

from dataclasses import dataclass

from evermoe.comm.membership import MembershipOptions
from evermoe.keeper import CopyOptions
from evermoe.planning import PRESETS
from evermoe.snapshot.window_plan import WindowOptions
from evermoe.train.stages import PipelinePreset


@dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a pipeline's session runs."""

    stage: int
    """Number of this rank's stage."""
    stages: int
    """Number of stages, 2 or more; virtual ones do not count."""
    data_parallel: int
    """This rank's data-parallel coordinate."""
    data_parallel_size: int
    """Number of ranks of each stage."""
    lighthouse: str
    """Address of the job's Lighthouse."""
    job: str
    """Name of the job, the same for all ranks."""
    preset: PipelinePreset = "baft"
    """`baft` copies all units to the node before this one in the pipeline, of the first node to the last one; `moetion`
    only what fewer than `copies` nodes hold anyway."""
    copies: int = 2
    """Nodes that are to hold each unit, those that train on it included (`moetion`; `baft` has one beside)."""
    node: str | None = None
    """The machine whose memory dies as one; default: the host's name."""
    memory_dir: str = "/dev/shm"
    """Folder of the named shared memory."""
    copy_buffer_bytes: int = 1 << 20
    """Bytes that travel at once, at most."""
    profile_steps: int = 20
    """Steps that are recorded to find the bubbles; until then, and with 0, copies travel at any time."""
    profile_every: int = 1000
    """Steps between two such profiles; another one follows each recovery."""
    hang_limit: float = 30.0
    """Seconds that a vote, and any wait in torch's groups, may last: more than a rank is ever idle."""
    agree_limit: float = 300.0
    """Seconds that `recover` waits for all ranks to be there."""

    def __post_init__(self) -> None:
        stage, stages = self.stage, self.stages
        choices = PRESETS.get(self.preset)
        if choices is None or not choices.for_pipelines:
            raise ValueError(f"PipelineSession: expected preset to be baft or moetion, got {self.preset!r}")
        if stages < 2 or not 0 <= stage < stages:
            raise ValueError(f"PipelineSession: expected 2 stages or more and 0 <= stage < {stages}, got stage {stage}")
        if not 0 <= self.data_parallel < self.data_parallel_size:
            raise ValueError(
                f"PipelineSession: expected 0 <= data_parallel < {self.data_parallel_size}, got {self.data_parallel}"
            )

    @property
    def rank(self) -> int:
        """This rank's number in the whole pipeline."""
        return self.stage * self.data_parallel_size + self.data_parallel

    @property
    def size(self) -> int:
        """Number of ranks in the whole pipeline."""
        return self.stages * self.data_parallel_size

    def membership_options(self) -> MembershipOptions:
        """Options of the rooms that know who is alive."""
        return MembershipOptions(
            lighthouse=self.lighthouse,
            job=self.job,
            node=self.node,
            hang_limit=self.hang_limit,
            agree_limit=self.agree_limit,
        )

    def copy_options(self) -> CopyOptions:
        """Options of the rooms that keep copies."""
        return CopyOptions(preset=self.preset, copies=self.copies)

    def window_options(self) -> WindowOptions:
        """Options of the rooms that find idle windows."""
        return WindowOptions(
            copy_buffer_bytes=self.copy_buffer_bytes,
            profile_steps=self.profile_steps,
            profile_every=self.profile_every,
        )
