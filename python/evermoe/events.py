"""Events of a session, which it passes to `Session(on_event=...)`: frozen dataclasses.

Steps are numbered from 0: step n leads from the state after n steps to the state after n + 1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

# fmt: off
__all__ = [
    "Begin", "Checkpoint", "ChunkSent", "Commit", "Confirm", "ConnectionLost", "Copy", "CoverageChanged",
    "Damaged", "Event", "Gather", "GradientsLogged", "Joined", "Measured", "MemberLost", "Phase",
    "ProtectionPlanned", "Recovered", "Reduce", "Send", "Skipped", "SnapshotReceived", "StandsBy", "Update",
    "Verified", "Vote",
]
# fmt: on


def name_of(kind: type[Event]) -> str:
    """Return the name of a kind of event in logs: that of its class, in snake case (`member_lost`)."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()


@dataclass(frozen=True)
class Event:
    """Base class of all events of a session."""

    @property
    def name(self) -> str:
        """Name of the kind of event in logs: see `name_of`."""
        return name_of(type(self))

    def fields(self) -> dict[str, Any]:
        """Return the event's fields by name, with values that JSON can represent."""
        return asdict(self)


Listener = Callable[[Event], None]
"""Callback for each event of a session."""

# ---- in a step, from the training thread


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


@dataclass(frozen=True)
class Protocol(Event):
    """An input of the commit protocol and the commands that it returned; tests replay them."""

    said: str
    """JSON of the input."""
    commands: str
    """JSON of the commands."""


@dataclass(frozen=True)
class Checkpoint(Event):
    """A checkpoint is on disk."""

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


# ---- when members change, from the training thread


@dataclass(frozen=True)
class ConnectionLost(Event):
    """A member was lost, or this one was dropped."""

    step: int
    reason: str
    """First line of the error."""


@dataclass(frozen=True)
class MemberLost(Event):
    """A member was lost. Each remaining member emits it once all of them know; one of them calls `on_lost` with it."""

    key: str
    """Identifies the loss: the member, and the last generation that it was in. Repeated events have the same key."""
    job: str
    member: str
    """Its unique name."""
    node: str
    """The machine that it ran on."""
    domain: str
    """Failure domains of that machine, separated by slashes; empty if unknown."""
    role: str
    """`train` or `replica`."""
    kind: str
    """`left`: it left on notice. `process`: its host answers, and reports that the process has ended. `hung`: its host
    answers, but the process is stopped or blocked. `host`: nothing answers: the host is lost or unreachable."""
    step: int
    """Steps taken when it was lost, as known to the member that noticed the loss."""
    generation: int
    """Generation of the group without it; in a pipeline that calls `on_lost` earlier, of the group with it."""
    reason: str
    """First line of the error by which it was noticed."""
    members: int
    """Workers that train now; in a pipeline that calls `on_lost` earlier, the remaining ones of the group with it."""
    wanted: int
    """Workers that the job waits for at its start: `members` of its options."""
    attempt: int
    """1, or more if a member that should call `on_lost` was itself lost before it confirmed the call."""


@dataclass(frozen=True)
class Phase(Event):
    """A phase of a recovery begins. `agree` also occurs alone, if new members turn out to be lost."""

    phase: str
    """`agree`, `rebuild`, `fetch` or `verify`."""


@dataclass(frozen=True)
class ProtectionPlanned(Event):
    """The session has planned which members hold which copies."""

    summary: str
    """One sentence on how units are covered."""
    survives_one: float
    """Probability that every unit survives, in some version, when one node fails."""
    survives_two: float
    """The same when two nodes fail at once."""
    locked_bytes: int = 0
    """Bytes of this member's shared memory that are page-locked, so that its GPU writes snapshots to them directly."""
    missing_bytes: int = 0
    """Bytes of all copies that their holders lack, over all members; only these are sent."""


@dataclass(frozen=True)
class Joined(Event):
    """This member is connected with all others. The fields hold until members change again."""

    job: str
    member: str
    """Its unique name."""
    node: str
    """The machine it runs on: all memory of a node is lost at once."""
    rank: int
    role: str
    """`train` or `replica`."""
    generation: int
    nodes: list[str]
    """Node of each member, by rank."""


@dataclass(frozen=True)
class StandsBy(Event):
    """This spare is ready to replace a member; repeated when the members that it may replace have changed."""

    connected: list[str]
    """Sorted names of the members to which it is connected: all that it can reach."""
    reserved_bytes: int
    """Bytes of shared memory that it has reserved; 0 if memory was short, which a warning reports."""


@dataclass(frozen=True)
class CoverageChanged(Event):
    """Losses that the complete copies would survive: before a recovery makes the missing ones, and once it has."""

    survives_one: float
    """Probability that every unit survives, in some version, when one node fails."""
    survives_two: float
    """The same when two nodes fail at once."""
    fatal: dict[str, int]
    """Losses of one node or two that the job would not survive: node names, joined by ` + `, and the number of units
    lost with them. A pair that contains a fatal node is omitted. At most 32, those with most units."""
    is_complete: bool
    """Whether all copies of the plan are complete."""


@dataclass(frozen=True)
class Recovered(Event):
    """All members resume: after a failure, a join, a move of experts, or at the start of a job."""

    started_at: float
    """Time on this machine's clock, seconds since 1970."""
    seconds: dict[str, float]
    """Seconds by phase: `agree`, `rebuild`, `fetch`, `verify`. `verify` includes copies that training waits for."""
    step: int
    """Steps taken in the state from which all resume."""
    steps_lost: int
    """Committed steps that were undone: 0 unless more copies were lost or damaged than the preset covers."""
    members: int
    """Workers that train now."""
    reason: str
    """Cause: the lost connection, `new members`, `this process has started` or `the load has shifted`."""
    fetched_bytes: int
    """Bytes that this member received from peers, or read from its node's memory or from disk."""
    fetched_units: int
    sources: dict[str, int]
    """Number of units by source: `peer`, `local memory`, `disk`."""
    digests_checked: int
    """Digests of units that were compared with another copy's, or with that of the received bytes."""
    digests_mismatched: int
    lost_units: list[str]
    """Units without a copy left in memory, if the job rolled back to a checkpoint."""
    stale: dict[str, int] = field(default_factory=dict)
    """Steps taken in the older copies of experts that were rolled back, by expert."""
    lost_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens in the updates that these experts lost."""
    plt: float = 0.0
    """Portion of lost tokens (PLT) of the run so far, averaged over layers."""
    failure: str = ""
    """The most severe failure, the same on all previous members. Empty: none. `left`, `process`, `hung` or `host`: as
    `MemberLost.kind`. `storage`: the memory of enough hosts that units were lost with it."""
    tier: str = ""
    """The most distant source of units, over all members: `own memory` (this host's shared memory), `peers` (other
    members' memory) or `store` (a checkpoint, or the saves of `pec`). Empty if nothing was fetched."""
    mtl: float = 0.0
    """MoE token loss of the run so far (MoEtion, Eq. 6): the portions of lost tokens of all layers, added up."""
    steps_undone: int = 0
    """Steps that members had applied, committed or not, and now compute again. With `gemini` and `baft` at most one,
    or 2 n - 1 if a version of their copies takes n steps."""
    late_bytes: int = 0
    """Part of `fetched_bytes` that arrives while the next step computes: optimizer state, which its update needs."""


# ---- from other threads


@dataclass(frozen=True)
class ChunkSent(Event):
    """A part of a snapshot was sent. From the thread `evermoe-snapshots`."""

    step: int
    """Steps taken in the snapshot."""
    sent: int
    """Bytes of the snapshot that were sent so far."""
    total: int
    """Bytes of all its parts."""
    when: str
    """When it began. `window`: in an idle window. `idle`: while no collective ran, since windows were unknown or
    training had paused. `background`: concurrently with compute, as planned. `vote`: while training waited for it,
    before a vote or for room. `recovery`: while training waited anyway, since members changed or training has ended."""


@dataclass(frozen=True)
class SnapshotReceived(Event):
    """A version from a peer matches its digests, and recoveries can use it. From the thread `evermoe-snapshots`."""

    step: int
    """Steps taken in the version."""
    units: int


@dataclass(frozen=True)
class Damaged(Event):
    """A copy that this member keeps by repeating steps differs from its trainer's state.

    A bit has flipped, or a step was not repeated exactly. The member does not use the copy, and requests the full
    state. From the thread `evermoe-gradients`, in a pipeline `evermoe-snapshots`, in a recovery the training thread.
    """

    unit: str
    step: int
    """Steps taken in the state that the copy should have."""
    reason: str


@dataclass(frozen=True)
class GradientsLogged(Event):
    """The other members' gradients of the next step are in this member's log, and take effect once the vote passes.
    From the thread `evermoe-gradients`."""

    step: int
    """Steps taken after it."""
