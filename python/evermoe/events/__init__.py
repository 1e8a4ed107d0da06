"""Events of a session, which it passes to `Session(on_event=...)`: frozen dataclasses.

Steps are numbered from 0: step n leads from the state after n steps to the state after n + 1.
"""

from evermoe.events.background_events import ChunkSent, Damaged, GradientsLogged, SickNode, SnapshotReceived
from evermoe.events.base_event import Event
from evermoe.events.member_events import (
    ConnectionLost,
    CoverageChanged,
    Joined,
    MemberLost,
    Phase,
    ProtectionPlanned,
    Recovered,
    StandsBy,
)
from evermoe.events.step_events import (
    Begin,
    Checkpoint,
    CheckpointVerified,
    Commit,
    Confirm,
    Copy,
    CorruptionFound,
    Gather,
    Measured,
    Reduce,
    SampleSkipped,
    Send,
    Skipped,
    SlowLoader,
    SlowMember,
    Update,
    Verified,
    Vote,
)

# fmt: off
__all__ = [
    "Begin", "Checkpoint", "CheckpointVerified", "ChunkSent", "Commit", "Confirm", "ConnectionLost", "Copy",
    "CorruptionFound", "CoverageChanged", "Damaged", "Event", "Gather", "GradientsLogged", "Joined", "Measured",
    "MemberLost", "Phase", "ProtectionPlanned", "Recovered", "Reduce", "SampleSkipped", "Send", "SickNode", "Skipped",
    "SlowLoader", "SlowMember", "SnapshotReceived", "StandsBy", "Update", "Verified", "Vote",
]
# fmt: on
