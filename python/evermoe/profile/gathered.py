"""Profiles of all ranks together."""

from __future__ import annotations

import json
import statistics
import zlib
from collections.abc import Sequence
from typing import NamedTuple

from evermoe.errors import CorruptCopy
from evermoe.planning.schedule import ChunkPlan, Receiver
from evermoe.planning.trace import chrome_trace, merge_traces
from evermoe.planning.windows import Span, StepProfile, Windows, find_windows
from evermoe.profile.meeting import in_one_order, meet
from evermoe.profile.recorder import Recorded


class RankProfile(NamedTuple):
    """Profile of one rank."""

    recorded: Sequence[Recorded]
    """Steps of the rank; `start` is on the shared clock."""
    clock_error: float
    """Largest error of these times in seconds."""

    def to_bytes(self) -> bytes:
        """The profile as compressed JSON."""
        rows = [
            [r.number, r.start, r.step.seconds, r.step.spans, r.free_device_bytes, r.free_host_bytes]
            for r in self.recorded
        ]
        return zlib.compress(json.dumps({"steps": rows, "clock_error": self.clock_error}).encode(), 1)

    @classmethod
    def from_bytes(cls, data: bytes) -> RankProfile:
        """Return the profile from bytes of `to_bytes`.

        Raises:
            CorruptCopy: the bytes are not those of a profile.
        """
        try:
            fields = json.loads(zlib.decompress(data))
            recorded = [
                Recorded(number, start, StepProfile(seconds, [Span(*span) for span in spans]), device, host)
                for number, start, seconds, spans, device, host in fields["steps"]
            ]
            return cls(recorded, float(fields["clock_error"]))
        except (zlib.error, ValueError, KeyError, TypeError) as error:
            raise CorruptCopy(f"the profile of a rank: expected the result of RankProfile.to_bytes; {error}") from None


class GatheredProfile:
    """Steps and windows of all ranks on one clock, the same on each; from `Profiler.gather_windows`.

    Transfers start when their last member has begun (see `evermoe.profile.meeting`), so that the wait of a rank for a
    peer counts as idle time of its network.
    """

    def __init__(self, profiles: Sequence[RankProfile], *, quantile: float, gamma: float) -> None:
        numbers = set.intersection(*({r.number for r in profile.recorded} for profile in profiles))
        if not numbers:
            raise ValueError(
                "gather_windows: the ranks have no step in common; call profiler.step() on each of them after each step"
            )
        recorded = [[r for r in profile.recorded if r.number in numbers] for profile in profiles]
        self.starts: list[list[float]] = [[r.start for r in rows] for rows in recorded]
        """Start of each step, by rank, in seconds of the shared clock."""
        met = [meet([r.step for r in rows], [r.start for r in rows]) for rows in zip(*recorded, strict=True)]
        self.steps: list[list[StepProfile]] = [in_one_order(steps) for steps in zip(*met, strict=True)]
        """Steps that all ranks have recorded, by rank."""
        self.windows: list[Windows] = [find_windows(steps, gamma=gamma, quantile=quantile) for steps in self.steps]
        """Windows by rank."""
        self.clock_errors: list[float] = [profile.clock_error for profile in profiles]
        """Largest error of a rank's times against those of rank 0, in seconds, by rank."""
        self.free_device_bytes: list[int | None] = [_lowest([r.free_device_bytes for r in rows]) for rows in recorded]
        """Least free device memory of all these steps, by rank; None without a GPU."""
        self.free_host_bytes: list[int | None] = [_lowest([r.free_host_bytes for r in rows]) for rows in recorded]
        """Least available host memory, by rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.steps)

    def receiver(self, sender: int, rank: int) -> Receiver:
        """Return `rank` as a destination of `sender`, for `plan_chunks`: its windows, and the delay of its step's
        start."""
        differences = [theirs - mine for mine, theirs in zip(self.starts[sender], self.starts[rank], strict=True)]
        return Receiver(rank, self.windows[rank], statistics.median(differences))

    def trace(self, plans: Sequence[ChunkPlan | None] = ()) -> str:
        """Return a trace of all ranks in Chrome's trace event format; see `evermoe.planning.trace.chrome_trace`.

        Raises:
            ValueError: there is not one plan for each rank, or a plan is not made from these windows.
        """
        if plans and len(plans) != self.size:
            raise ValueError(f"plans: expected one for each of {self.size} ranks, got {len(plans)}")
        each = []
        for rank, (steps, starts) in enumerate(zip(self.steps, self.starts, strict=True)):
            plan = plans[rank] if plans else None
            each.append(chrome_trace(without_gaps(steps, starts), self.windows[rank], plan, rank=rank, start=starts[0]))
        return merge_traces(each)


def without_gaps(steps: Sequence[StepProfile], starts: Sequence[float]) -> list[StepProfile]:
    """Return the steps, each prolonged until the next one starts: unrecorded time in between is idle time."""
    ends = [*starts[1:], starts[-1] + steps[-1].seconds]
    return [StepProfile(end - start, step.spans) for step, start, end in zip(steps, starts, ends, strict=True)]


def _lowest(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return min(known, default=None)
