"""Events of a session: what `Session(on_event=...)` is told, each a frozen dataclass.

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
    """Something that has happened in a session."""

    @property
    def name(self) -> str:
        """Name of the kind of event in logs: see `name_of`."""
        return name_of(type(self))

    def fields(self) -> dict[str, Any]:
        """The event's fields by name, as JSON can hold them."""
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
    """The block of a step has ended: its gradients are about to be summed over the members."""

    step: int


@dataclass(frozen=True)
class Send(Event):
    """The gradients of a step are complete: those for replicas are sent, if they were not already."""

    step: int
    """Steps taken after it."""


@dataclass(frozen=True)
class Confirm(Event):
    """What must be on other nodes before the vote is there; in a recovery: all copies, unless they are tried again."""

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
    """The vote of a step has passed, but all members leave out its update: a loss or a gradient is not finite."""

    step: int
    rank: int | None
    """The member that it came from; None if it came from several."""


@dataclass(frozen=True)
class Gather(Event):
    """The owners of what is not an expert are about to send its new weights; with `dense="sharded"`."""

    step: int
    """Steps taken in them."""


@dataclass(frozen=True)
class Copy(Event):
    """The state has changed: snapshots of it begin; in a recovery: the copies that are missing."""

    step: int
    """Steps taken in it."""


@dataclass(frozen=True)
class Commit(Event):
    """No failure that the preset covers undoes a step any more: known at the next vote, or at the end of the job."""

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
    """A step was taken: what it took, and how far its copies are behind. Its vote may still turn out to be undone."""

    step: int
    seconds: float
    """From the end of the step before, or of a recovery, to its own end: with what the script does between steps."""
    tokens: int
    """Tokens of the global batch, as the MoE layers count them; 0 where there are none, and on a replica node."""
    imbalance: float | None
    """Tokens that the busiest member computes over the mean of all, in the layer where that is largest; as of the
    latest step that is a multiple of 10, or the first after a recovery. None without a MoE layer."""
    expert_imbalance: float | None
    """Tokens of the busiest expert over the mean of all, likewise: what the router makes of it."""
    lag: dict[str, int]
    """By kind of copy, steps by which this member's are behind training: the oldest complete copy of `replayed`,
    `snapshot` (on other nodes) and `local` ones; the newest on disk of `persisted` and `checkpoint`. Kinds that the
    session has none of are left out."""
    sent_bytes: dict[str, int]
    """By kind, `replayed` and `snapshot`, bytes of copies that this process has sent to other members so far."""
    gpu_bytes: int = 0
    """Bytes of the GPU's memory in which snapshots are made, see `snapshot_memory`, and what they need besides."""
    plt_at_risk: float | None = None
    """With `moetion` and `pec`, the portion of the run's tokens that a failure now would lose which takes all experts
    that are copied back to their latest copies on other nodes, or in the checkpoint store: over the tokens of all
    experts of a layer, averaged over layers. None with other presets, without a MoE layer, and on a replica node."""
    starvation: int | None = None
    """Likewise, copies that have passed over the expert with tokens at risk that waits longest: steps with `moetion`,
    saves with `pec`; 0 if no expert waits."""


@dataclass(frozen=True)
class Protocol(Event):
    """The commit protocol was told an event and gave commands; tests replay them."""

    said: str
    """JSON of the event."""
    commands: str
    """JSON of the commands."""


@dataclass(frozen=True)
class Checkpoint(Event):
    """A checkpoint is on disk."""

    step: int
    """Steps taken in it."""
    path: str


@dataclass(frozen=True)
class Verified(Event):
    """All steps are taken, and copies of the last version were compared."""

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
    """A member of the group before is not in this one; told by each member of this one, once all of them know it.

    `on_lost` is called with it by one of them.
    """

    key: str
    """Names the loss: of the member and the generation that it was last in. The same where it is told again."""
    job: str
    member: str
    """Its name, unlike that of any other process."""
    node: str
    """The machine that it was on."""
    domain: str
    """What fails with that machine, with slashes; empty where unknown."""
    role: str
    """`train` or `replica`."""
    kind: str
    """`left`: on notice. `process`: its host answers, and says that the process has ended. `hung`: its host answers for
    it, and it does not: it is stopped, or waits. `host`: nothing answers: its host is gone, or cut off."""
    step: int
    """Steps taken when it was lost, as the member knows that noticed."""
    generation: int
    """Generation of the group without it; in a pipeline that calls `on_lost` before there is one, of that with it."""
    reason: str
    """First line of the error by which it was noticed."""
    members: int
    """Workers that train now; in such a pipeline, those of the group with it that are left."""
    wanted: int
    """Workers that the job was to have at its start: `members` of its options."""
    attempt: int
    """1; more where members that were to call `on_lost` for it were lost before the others knew that they had."""


@dataclass(frozen=True)
class Phase(Event):
    """A phase of a recovery begins; `agree` alone also where new members turn out to be gone."""

    phase: str
    """`agree`, `rebuild`, `fetch` or `verify`."""


@dataclass(frozen=True)
class ProtectionPlanned(Event):
    """The holders of all copies were planned anew."""

    summary: str
    """One sentence that says how units are covered."""
    survives_one: float
    """Probability that every unit is left, in some version, when one node fails."""
    survives_two: float
    """The same when two nodes fail at once."""
    locked_bytes: int = 0
    """Shared memory of this member that is page-locked, so that its GPU writes its snapshots there itself."""
    missing_bytes: int = 0
    """Bytes of all copies that their holders do not have yet, over all members: these alone are sent."""


@dataclass(frozen=True)
class Joined(Event):
    """This member is connected with all others: its place among them, until members change again."""

    job: str
    member: str
    """Its name, unlike that of any other."""
    node: str
    """The machine whose memory is lost as one."""
    rank: int
    role: str
    """`train` or `replica`."""
    generation: int
    nodes: list[str]
    """Node of each member, by rank."""


@dataclass(frozen=True)
class StandsBy(Event):
    """This spare is ready: told once, and again when the members that it may replace have changed."""

    connected: list[str]
    """Names of the members to which it is connected, in the order of names: all, if they answer here."""
    reserved_bytes: int
    """Shared memory that it has reserved; 0 where it found no room, which a warning says."""


@dataclass(frozen=True)
class CoverageChanged(Event):
    """Which losses the copies that are complete would survive now: before a recovery makes those that are missing, and
    once all are complete."""

    survives_one: float
    """Probability that every unit is left, in some version, when one node fails."""
    survives_two: float
    """The same when two nodes fail at once."""
    fatal: dict[str, int]
    """Losses that it would not survive: the nodes, joined by ` + `, and how many units would be lost with them. Of one
    node and of two; a pair of which one alone is fatal is left out. At most 32, those of most units."""
    is_whole: bool
    """Whether all copies of the plan are complete."""


@dataclass(frozen=True)
class Recovered(Event):
    """All members resume: after a failure, a join, a move of experts, or at the start of a job."""

    started_at: float
    """Time on this machine's clock, seconds since 1970."""
    seconds: dict[str, float]
    """By phase: `agree`, `rebuild`, `fetch`, `verify`; copies for which training waits are made in `verify`."""
    step: int
    """Steps taken in the state from which all resume."""
    steps_lost: int
    """Committed steps that had to be undone: 0 unless more copies were lost or damaged than the preset covers."""
    members: int
    """Workers that train now."""
    reason: str
    """Why members agreed: the lost connection, `new members`, `this process has started` or `the load has shifted`."""
    fetched_bytes: int
    """What this member received from peers, or read from its node's memory or from disk."""
    fetched_units: int
    sources: dict[str, int]
    """Units by where they came from: `peer`, `local memory`, `disk`."""
    digests_checked: int
    """Digests of units compared with those of another copy or of the bytes that arrived."""
    digests_mismatched: int
    lost_units: list[str]
    """Units of which no copy was left in memory, when the job went back to a checkpoint."""
    stale: dict[str, int] = field(default_factory=dict)
    """Steps taken in the older copies of experts that were rolled back, by expert."""
    lost_tokens: dict[str, int] = field(default_factory=dict)
    """Tokens in the updates that these experts lost."""
    plt: float = 0.0
    """Portion of lost tokens of the run so far, averaged over layers."""
    failure: str = ""
    """What has failed, the worst of it; the same on all members that were there: empty (nothing), `left`, `process`,
    `hung` or `host`, each as `MemberLost.kind`; `storage`: the memory of enough hosts that units were lost with it."""
    tier: str = ""
    """Where units came from, the farthest of all members' sources: `own memory` (what this host shares), `peers` (other
    members' memory), `store` (a checkpoint, or what `pec` saves); empty where none had to be fetched."""
    mtl: float = 0.0
    """MoE token loss of the run so far (MoEtion, Eq. 6): the portions of lost tokens of all layers, added up."""
    steps_undone: int = 0
    """Steps that members had taken, committed or not, and now compute again: one at most with `gemini` and `baft`, and
    2 n - 1 where a version of their copies takes n steps."""
    late_bytes: int = 0
    """Those of `fetched_bytes` that arrive while the next step computes: optimizer state, which its update needs."""


# ---- from other threads


@dataclass(frozen=True)
class ChunkSent(Event):
    """A part of a snapshot was sent. From the thread `evermoe-snapshots`."""

    step: int
    """Steps taken in the snapshot."""
    sent: int
    """Bytes so far."""
    total: int
    """Bytes of all parts."""
    when: str
    """When it began. `window`: in an idle window. `idle`: while no collective ran, as windows were unknown or training
    had paused. `background`: concurrently with compute, as planned. `vote`: training waited for it, before a vote or
    for room. `recovery`: training waited in any case, as members changed or all steps were taken."""


@dataclass(frozen=True)
class SnapshotReceived(Event):
    """A version that came from a peer matches its digests, and is visible. From the thread `evermoe-snapshots`."""

    step: int
    """Steps taken in it."""
    units: int


@dataclass(frozen=True)
class Damaged(Event):
    """A copy that this member keeps by repeating steps is not what its trainer has: a bit has flipped, or a step was
    not repeated exactly. It is not used; its full state is asked for. From the thread `evermoe-gradients`, in a
    pipeline `evermoe-snapshots`, or in a recovery from the training thread."""

    unit: str
    step: int
    """Steps taken in the state that it should have been."""
    reason: str


@dataclass(frozen=True)
class GradientsLogged(Event):
    """The gradients of others for the next step are in this member's log, where they count once the vote has passed.
    From the thread `evermoe-gradients`."""

    step: int
    """Steps taken after it."""
