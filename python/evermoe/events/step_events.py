"""Events in a step, from the training thread."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from evermoe.events.base_event import Event


@dataclass(frozen=True)
class Begin(Event):
    """A step begins: its gradients are zeroed."""

    step: int


@dataclass(frozen=True)
class Reduce(Event):
    """The `with step` block has ended: its gradients are about to be summed over the members."""

    step: int


@dataclass(frozen=True)
class Send(Event):
    """The gradients of a step are complete: those that replicas still lack are sent to them."""

    step: int
    """Steps taken after it."""


@dataclass(frozen=True)
class Confirm(Event):
    """The copies that the vote needs have arrived; in a recovery: all of the plan, unless they are tried again."""

    step: int
    """Steps taken after it."""


@dataclass(frozen=True)
class Vote(Event):
    """The vote of a step is about to be taken."""

    step: int


@dataclass(frozen=True)
class Update(Event):
    """The vote of a step has passed: the optimizer is about to step."""

    step: int


@dataclass(frozen=True)
class Skipped(Event):
    """The vote of a step has passed, but no member applies its update: a loss or a gradient is not finite."""

    step: int
    rank: int | None
    """The member whose value is not finite; None if there are several."""


@dataclass(frozen=True)
class Gather(Event):
    """With `shard_optimizer=True`: owners are about to send the new weights of the parameters outside experts."""

    step: int
    """Steps taken in these weights."""


@dataclass(frozen=True)
class Copy(Event):
    """The state has changed: its snapshots begin; in a recovery: the missing copies."""

    step: int
    """Steps taken in the state."""


@dataclass(frozen=True)
class Commit(Event):
    """A step is committed: no failure that the preset covers can undo it. Known at the next vote, or the job's end."""

    step: int
    loss: float
    """Mean over the global batch."""
    members: int
    """Workers that trained."""
    generation: int
    """Number of the membership that took the step: it grows at each change."""
    grad_norm: float = math.nan
    """Norm of the mean loss's gradient over all parameters, before `on_gradients` and `max_grad_norm`."""
    samples: int = 0
    """Samples that the job has consumed with this step, of all members; 0 in a pipeline and on a replica node."""
    tokens: int = 0
    """Terms of the losses so far, as `count` of `step.backward` gives them; 0 without counts, as for `samples`."""
    epoch: float = math.nan
    """Epochs consumed with this step; NaN where the sampler has no attribute `epoch`, as for `samples`."""


@dataclass(frozen=True)
class Measured(Event):
    """Metrics of an applied step, and the lag of its copies. The step is not committed yet."""

    step: int
    seconds: float
    """From the end of the previous step, or of a recovery, to its own end, including the script's work in between."""
    tokens: int
    """Tokens of the global batch, as the MoE layers count them; 0 without such layers, and on a replica node."""
    imbalance: float | None
    """Tokens that the busiest member computes divided by the mean of all members, in the layer with the largest ratio.
    Measured at the latest step that is a multiple of 10, or the first after a recovery. None without a MoE layer."""
    expert_imbalance: float | None
    """Tokens of the busiest expert divided by the mean of all experts, in the layer with the largest ratio, at the same
    step. It shows how evenly the router chooses, before replicas share the tokens."""
    lag: dict[str, int]
    """Steps by which this member's copies are behind training, by kind of copy. Of `replayed`, `snapshot` (on other
    nodes) and `local`: the oldest complete copy. Of `persisted` and `checkpoint`: the newest on disk. Kinds that the
    session does not have are omitted."""
    sent_bytes: dict[str, int]
    """Bytes of copies that this process has sent to other members so far, by kind: `replayed` and `snapshot`."""
    gpu_bytes: int = 0
    """Bytes of GPU memory that snapshots occupy, buffers included; see `snapshot_memory`."""
    plt_at_risk: float | None = None
    """With `moetion` and `pec`: fraction of the run's tokens that a failure now would lose, averaged over layers. It
    assumes that all copied experts roll back to their latest copies on other nodes (`moetion`) or in the checkpoint
    store (`pec`). None with other presets, without a MoE layer, and on a replica node."""
    starvation: int | None = None
    """With `moetion` and `pec`: of all experts with tokens at risk, the longest wait for a copy, in copies that were
    made of others meanwhile: steps with `moetion`, saves with `pec`. 0 if no expert waits; None as `plt_at_risk`."""
    data_seconds: float = 0.0
    """Part of `seconds` in which this member waited for its batch, that is, for its loader or sampler."""
    own_seconds: float = 0.0
    """Seconds from the previous vote to this one in which this member did not wait for others; 0 on a replica node."""
    slow: str = ""
    """Part by which this member is slower than the others, as `SlowMember.part`; empty if it is not."""


@dataclass(frozen=True)
class SlowLoader(Event):
    """This member waits long for its batches, and the others wait for it. Emitted once until its loader is fast again.

    A stuck loader is reported from the thread `evermoe-clock`, while the training thread still waits.
    """

    step: int
    member: str
    """Its unique name."""
    loader: str
    """Class of its loader or sampler."""
    seconds: float
    """`slow`: median of the waits for a batch in the latest steps. `stuck`: duration of the current wait so far."""
    fraction: float
    """`slow`: median of the parts of these steps that the waits took. `stuck`: 1."""
    kind: str
    """`slow`: waits have taken at least a quarter of the latest steps. `stuck`: a batch has not arrived for half of
    `hang_timeout`."""


@dataclass(frozen=True)
class SlowMember(Event):
    """A member is slower than the others, which wait for it. Each member emits it, once until that one is fast again.

    Compared are the seconds of each member's own work in a step, without its waits for other members, over 16 steps;
    and those of messages of 256 KiB among nodes, one of each node in every second step, over 8 of these.
    """

    step: int
    member: str
    """Its unique name."""
    node: str
    """The machine it runs on."""
    rank: int
    part: str
    """Part with most of the difference: `compute`, `loader` (its waits for its batches), `checkpoint` (its waits for
    its own disk) or `processor` (other processes of its machine had the processors); or `network` (the messages to
    or from its node take longer)."""
    seconds: float
    """Median of its own seconds a step, or of the seconds of the messages."""
    usual: float
    """Median of the other members' seconds."""
    factor: float
    """Typical ratio of the two: 1.2 or more, 3 or more of `network`."""


@dataclass(frozen=True)
class SampleSkipped(Event):
    """A sample of this member's readers has raised an exception, and is left out of a step that was taken."""

    step: int
    reader: int
    epoch: int
    number: int
    """Number of the sample in the epoch of the reader; of an item of which samples are made, its number in its source.
    """
    reason: str
    """Class and message of the exception."""


@dataclass(frozen=True)
class Protocol(Event):
    """An input of the commit protocol and the commands that it returned; tests replay them."""

    said: dict[str, Any]
    """Fields of the input."""
    commands: list[dict[str, Any]]
    """Fields of each command."""


@dataclass(frozen=True)
class Checkpoint(Event):
    """A checkpoint is on disk."""

    step: int
    """Steps taken in the checkpoint."""
    path: str


@dataclass(frozen=True)
class CheckpointVerified(Event):
    """Members have compared all state that several of them train since a checkpoint, and found no difference."""

    step: int
    """Steps taken in the checkpoint."""
    path: str


@dataclass(frozen=True)
class Verified(Event):
    """All steps are taken, and the copies of the last version were compared."""

    digests_checked: int
    digests_mismatched: int
    units: list[str]
    """Units whose copies differ."""


@dataclass(frozen=True)
class CorruptionFound(Event):
    """In the vote on a step members differed in what must be the same, and refused the update.

    If a copy that repeats steps differs from its trainer and takes its state, the update is not refused.
    """

    step: int
    units: list[str]
    """Those of which a part was compared."""
    ranks: list[int]
    """Members that differ from the majority; empty if there is none, as with two holders."""
    nodes: list[str]
    """Their nodes."""
    action: str
    """`repair`, `evict` or `stop`."""
