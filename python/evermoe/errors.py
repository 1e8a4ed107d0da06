"""Exceptions of evermoe, by what the caller can do about them."""

__all__ = [
    "CorruptCopy",
    "CorruptState",
    "EvermoeError",
    "IslandLost",
    "LeftBehind",
    "LostExperts",
    "NonFiniteLoss",
    "PeerLost",
    "PersistFailed",
    "UnequalForwards",
    "UnfitNode",
    "UnsupportedState",
]

LEFT_CODE = 143
"""Exit code of a process that has left its job on SIGTERM: 128 and the number of that signal."""
REQUEUE_CODE = 75
"""Exit code of a process that has left its job on SIGUSR1 or SIGUSR2, the notice before a time limit.

Start the process again to resume. The code is `EX_TEMPFAIL` of sysexits.h; schedulers can be set to requeue on it.
"""


class EvermoeError(Exception):
    """Base class of evermoe's exceptions."""


class CorruptCopy(EvermoeError):
    """Bytes of a copy do not match their digest, or a file is not what it claims to be."""


class CorruptState(EvermoeError):
    """Members that must hold the same bits differ, and by `on_corruption` this process stops. No member took the step.

    If the job stops, the message names the newest verified checkpoint. `step` is the step's number, `units` are those
    that differ, `ranks` the members that a majority has named.
    """

    def __init__(self, message: str, step: int, units: list[str], ranks: list[int]) -> None:
        super().__init__(message)
        self.step, self.units, self.ranks = step, units, ranks


class CaptureCancelled(EvermoeError):
    """A capture was cancelled, or its engine shut down, before it was complete; its version will never exist."""


class PersistFailed(EvermoeError):
    """A save to disk failed. Training continues; the next save tries again."""


class PeerLost(EvermoeError):
    """A member of the group died, hung past the timeout or closed its socket; the session recovers from it."""


class UnitsMissing(PeerLost):
    """No current member has some units; the session waits a while for members that may return."""


class LostExperts(EvermoeError):
    """No copy of some units is left in any memory, and no checkpoint contains them. `units` names them."""

    def __init__(self, message: str, units: list[str]) -> None:
        super().__init__(message)
        self.units = units


class TooFewFiles(EvermoeError):
    """This process may open fewer files than the job's members need connections; the message has both numbers."""


class JobFinished(EvermoeError):
    """The job that this process wants to join has already committed its last step."""


class JoinTimeout(EvermoeError):
    """Too few members joined, or the Lighthouse did not answer, within the timeout."""


class UnfitNode(EvermoeError):
    """This process has not joined its job, as its GPU or its node is faulty: `hardware`.

    It has failed the self-test, or the job's members refuse it, as one of them has left when it was faulty. The message
    has the reason, and in the second case the command by which an operator lifts the quarantine.
    """

    def __init__(self, message: str, hardware: str) -> None:
        super().__init__(message)
        self.hardware = hardware


class LeftBehind(EvermoeError):
    """The other members continued without this one, and none of them is left to report what they committed."""


class IslandLost(EvermoeError):
    """The island of this process has lost another process, and the other islands continue without it.

    Start the complete island again, as torchrun does: it joins the others and takes their state.
    """


class NonFiniteLoss(EvermoeError):
    """The loss or a gradient of a step is infinite or not a number. No member applied the step.

    `step` is the step's number; `rank` the member with such a value, None if there are several.
    """

    def __init__(self, message: str, step: int, rank: int | None) -> None:
        super().__init__(message)
        self.step, self.rank = step, rank


class UnequalForwards(EvermoeError):
    """Members ran different numbers of forward passes in a step and waited for each other; the message names them."""


class NotReplayable(EvermoeError):
    """The optimizer's steps cannot be repeated bit for bit on another member: its state must be sent instead."""


class UnsupportedState(EvermoeError, ValueError):
    """The optimizer, or the loop's own state, cannot be divided into units; the message says why."""


class UnsafeFolder(EvermoeError, ValueError):
    """A folder of shared memory belongs to another user, or other users may read or write it; the message names it."""


class FolderInUse(EvermoeError, ValueError):
    """Live processes of another run of the job use one of its folders; the message names the run and the remedy."""


class ReplicaBehind(EvermoeError):
    """A replica cannot reach the step; the message gives the reason, and the steps that it has."""


class LaunchError(EvermoeError):
    """A worker failed; the message has the end of its output."""
