"""Exceptions of evermoe, by what the caller can do about them."""

__all__ = [
    "CorruptCopy",
    "EvermoeError",
    "LeftBehind",
    "LostExperts",
    "NonFiniteLoss",
    "PeerLost",
    "PersistFailed",
    "UnequalForwards",
    "UnsupportedState",
]

LEFT_CODE = 143
"""Exit code of a process that has left its job on SIGTERM: 128 and the number of that signal."""
REQUEUE_CODE = 75
"""Exit code of a process that has left its job on SIGUSR1 or SIGUSR2, the notice before a time limit: start it again
to resume. It is `EX_TEMPFAIL` of sysexits.h, which schedulers can be set to requeue on."""


class EvermoeError(Exception):
    """Base of everything that evermoe raises on its own account."""


class CorruptCopy(EvermoeError):
    """Bytes of a copy do not match their digest, or a file is not what it claims to be."""


class CaptureCancelled(EvermoeError):
    """A capture was cancelled, or its engine shut down, before it was whole; its version will never be there."""


class PersistFailed(EvermoeError):
    """What should be saved did not get to disk. Training continues; what is saved next tries again."""


class PeerLost(EvermoeError):
    """A member of the group died, hung past the limit or closed its socket; the session recovers from it."""


class UnitsMissing(PeerLost):
    """No member that is here now has some units; the session waits a while for others that may come back."""


class LostExperts(EvermoeError):
    """No copy of some units is left in any memory and no checkpoint holds them. `units` names them."""

    def __init__(self, message: str, units: list[str]) -> None:
        super().__init__(message)
        self.units = units


class TooFewFiles(EvermoeError):
    """This process may not open as many files as the job's members need connections; the message has both numbers."""


class JobFinished(EvermoeError):
    """The job that this process wanted to join has committed its last step already."""


class JoinTimeout(EvermoeError):
    """Too few members came, or the Lighthouse did not answer, within the time limit."""


class LeftBehind(EvermoeError):
    """The other members went on without this one, and none of them is left to tell it what they committed."""


class NonFiniteLoss(EvermoeError):
    """The loss or a gradient of a step is infinite or not a number. The step was taken by no member.

    `step` is the step's number; `rank` the member that it came from, None if it came from several.
    """

    def __init__(self, message: str, step: int, rank: int | None) -> None:
        super().__init__(message)
        self.step, self.rank = step, rank


class UnequalForwards(EvermoeError):
    """Members ran different numbers of forwards in a step, so that they waited for each other; it names them."""


class NotReplayable(EvermoeError):
    """The optimizer's steps cannot be repeated bit for bit elsewhere: its state must be sent instead."""


class UnsupportedState(EvermoeError, ValueError):
    """The optimizer, or the loop's own state, cannot be divided into units; the message says why."""


class UnsafeFolder(EvermoeError, ValueError):
    """A folder of shared memory belongs to another user, or others may write or read it; the message names it."""


class FolderInUse(EvermoeError, ValueError):
    """Living processes of another run of the job use a folder of it: the message names the run, and says what to do."""


class ReplicaBehind(EvermoeError):
    """A replica cannot be brought to the step; the message says why, and which steps it has."""


class LaunchError(EvermoeError):
    """A worker could not do its part; the message has the end of its output."""
