"""Events when members change, from the training thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from evermoe.events.base_event import Event


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
