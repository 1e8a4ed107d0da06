"""Events from other threads."""

from __future__ import annotations

from dataclasses import dataclass

from evermoe.events.base_event import Event


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
class SickNode(Event):
    """This member's GPU or processor is faulty, or reports a problem. Each problem comes once.

    From the thread `evermoe-health`; before the member has joined, from the training thread.
    """

    member: str
    node: str
    hardware: str
    """UUID of the GPU; the node for a member without one."""
    problem: str
    action: str
    """`evict`: this member leaves after the step, if others train. `warn`: none."""


@dataclass(frozen=True)
class GradientsLogged(Event):
    """The other members' gradients of the next step are in this member's log, and take effect once the vote passes.
    From the thread `evermoe-gradients`."""

    step: int
    """Steps taken after it."""
