"""The profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from evermoe.comm.courier import Sent
from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.planning.schedule import ChunkPlan
from evermoe.planning.trace import SentChunk, chrome_trace
from evermoe.planning.windows import Change, Kind, Resource, StepProfile, Windows, find_windows, has_changed
from evermoe.profile import compute, network
from evermoe.profile.clocks import Clock
from evermoe.profile.files import write_atomically
from evermoe.profile.gathered import GatheredProfile, RankProfile, without_gaps
from evermoe.profile.patches import Patches
from evermoe.profile.peers import clock_offset, connect
from evermoe.profile.recorder import OpenSpan, Recorded, Recorder

T = TypeVar("T")

KEEP = 20
"""Default number of steps on which windows are based."""
WEEK = 604800.0
"""Seconds of a week. Traces count from the last full week since 1970, as microseconds since 1970 would lose
nanoseconds."""


class Profiler:
    """Records what each step keeps busy, and finds when it leaves the network or the host link idle.

        with evermoe.profile.Profiler(model) as profiler:
            for batch in profiler.steps(loader):            # or profiler.steps(session.steps(1000))
                ...                                         # an ordinary step
        profiler.windows()                                  # this rank's
        profiler.gather_windows(group)                      # all ranks', on one clock
        profiler.write_trace("rank0.json")                  # for ui.perfetto.dev

    It records forward of the model, or of each microbatch of pipeline stages; backward; the optimizers; transfers of
    `evermoe` and `torch.distributed`, with bytes and peers; copies between host and GPU. Times are those of the GPU's
    streams for work on a GPU, else of the host's monotonic clock. The model, its results and its gradients stay the
    same; `detach` restores all wrapped methods. A process can have one attached profiler at a time. Transfers of the
    session's copies are not recorded: they travel in the background, in the windows.

    Args:
        model: model whose forward is recorded; not needed for stages of `torch.distributed.pipelining`.
        device: device that computes; default: the model's, else the current GPU if CUDA is in use, else the CPU.
        keep: number of latest steps to keep.
        rank: this rank; default: that of `torch.distributed` if it is initialised, else 0. `gather_windows` learns it
            from the group.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        *,
        device: torch.device | str | None = None,
        keep: int = KEEP,
        rank: int | None = None,
    ) -> None:
        if keep < 1:
            raise ValueError(f"Profiler: expected keep >= 1, got {keep}")
        if rank is None:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        self.model, self.rank = model, rank
        self._to_shared = time.time() % WEEK - time.perf_counter_ns() / 1e9
        """Seconds from the host's monotonic clock to that of traces: this host's time, or rank 0's after a gather."""
        self._recorder = Recorder(Clock(_device(model, device)), keep)
        self._patches = Patches()
        self._baseline: tuple[Windows, int] | None = None

    # ---- recording

    def attach(self) -> Profiler:
        """Start recording with a new step and discard earlier records. No-op if attached."""
        if self._recorder.on:
            return self
        recorder, patches = self._recorder, self._patches
        try:
            if self.model is not None:
                compute.attach_model(recorder, patches, self.model)
            compute.attach_backward(recorder, patches)
            compute.attach_optimizers(recorder, patches)
            compute.attach_pipelines(recorder, patches)
            network.attach_group(recorder, patches)
            if dist.is_available():
                network.attach_torch(recorder, patches)
            if recorder.clock.device.type == "cuda":
                network.attach_copies(recorder, patches)
        except BaseException:
            patches.undo()
            raise
        recorder.start()
        return self

    def detach(self) -> None:
        """Restore all wrapped methods. The current step is discarded, the steps before it are kept."""
        self._recorder.stop()
        self._patches.undo()

    def __enter__(self) -> Profiler:
        return self.attach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.detach()

    def step(self) -> None:
        """End the current step and begin the next one. Call it the same number of times on each rank."""
        if self._recorder.on:
            compute.attach_pipelines(self._recorder, self._patches)  # if stages exist by now
        self._recorder.next_step()

    @property
    def began(self) -> int | None:
        """Return the start of the current step, of `time.perf_counter_ns`; None if a GPU reports it later, or
        without a step."""
        return self._recorder.began

    def steps(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the same items; each begins a step, which ends when the next item is requested."""
        if self._recorder.on:
            self._recorder.restart_step()
        for batch in batches:
            yield batch
            self.step()

    @contextmanager
    def span(
        self, name: str, kind: Kind, resource: Resource, *, bytes: int = 0, peers: Sequence[int] = ()
    ) -> Iterator[None]:
        """Record a block of user code, such as a transfer by another library.

        Args:
            name: name of the span, the same in every step.
            kind: kind of the span.
            resource: resource that it keeps busy.
            bytes: number of bytes that it moves.
            peers: ranks at the other end.
        """
        found = self._recorder.begin(name, kind, resource, bytes, peers)
        try:
            yield
        finally:
            if found is not None:
                self._recorder.close(found)

    def unseen(self) -> AbstractContextManager[None]:
        """Exclude transfers of the calling thread from the record within this block."""
        return self._recorder.unseen("network")

    def follow_network(self, begins: Callable[[OpenSpan], None], ends: Callable[[OpenSpan], None]) -> None:
        """While attached, call these functions at the begin of each transfer of training, and when its end is known.

        The second call may come from another thread.
        """
        self._recorder.on_begin = lambda span: begins(span) if span.resource == "network" else None
        self._recorder.on_end = lambda span: ends(span) if span.resource == "network" else None

    # ---- results

    @property
    def recorded(self) -> list[Recorded]:
        """The latest steps, oldest first, with their number, start, spans and free memory."""
        return self._recorder.steps()

    @property
    def unfinished(self) -> int:
        """Number of transfers that were left out because no thread had waited for them one step later."""
        return self._recorder.unfinished

    def windows(self, *, quantile: float = 0.1, gamma: float = 0.9) -> Windows:
        """Return the idle windows of this rank, found without other ranks: a receive counts as busy from its posting.

        `changed` then compares with these steps. See `evermoe.planning.windows.find_windows`.

        Raises:
            ValueError: no step is over yet, or options out of range.
        """
        recorded = self._steps_or_error("windows")
        found = find_windows([r.step for r in recorded], quantile=quantile, gamma=gamma)
        self._baseline = (found, recorded[-1].number)
        return found

    def gather_windows(
        self, group: Group | dist.ProcessGroup | None = None, *, quantile: float = 0.1, gamma: float = 0.9
    ) -> GatheredProfile:
        """Return steps and windows of all ranks on one clock, equal on every rank. Collective.

        Clocks are compared by round trips with rank 0 (`evermoe.profile.peers.clock_offset`); half of the quickest
        one bounds the error. Traces then use that clock, and `changed` compares with these steps.

        Args:
            group: the participating ranks; None for the default group of `torch.distributed`.
            quantile: see `evermoe.planning.windows.find_windows`.
            gamma: see `evermoe.planning.windows.find_windows`.

        Raises:
            ValueError: no group, or the ranks have no step in common.
            PeerLost: a member of a session's group is lost.
        """
        peers = connect(group)
        on, self._recorder.on = self._recorder.on, False
        try:
            self._recorder.clock.anchor()
            offset = clock_offset(peers)
            of_rank_0 = gather_json(peers, self._to_shared)[0]
            self.rank, self._to_shared = peers.rank, of_rank_0 + offset.seconds
            shared = [r._replace(start=r.start + self._to_shared) for r in self.recorded]
            mine = RankProfile(shared, offset.error).to_bytes()
            profiles = [RankProfile.from_bytes(each) for each in peers.all_gather_bytes(mine)]
        finally:
            self._recorder.on = on
        found = GatheredProfile(profiles, quantile=quantile, gamma=gamma)
        self.windows(quantile=quantile, gamma=gamma)
        return found

    def changed(self, *, latest: int = 5, tolerance: float = 0.01) -> Change | None:
        """Return how the latest steps differ from those of `windows` or `gather_windows`; None if they do not.

        If they differ, find windows and plan again.

        Args:
            latest: number of steps to compare; with fewer new ones the answer is None.
            tolerance: part of a step below which a difference is ignored.

        Raises:
            ValueError: windows were not found yet.
        """
        if self._baseline is None:
            raise ValueError("changed: expected a call of windows() or gather_windows() before")
        windows, last = self._baseline
        new = [r.step for r in self.recorded if r.number > last]
        return has_changed(windows, new[-latest:], tolerance=tolerance) if len(new) >= latest else None

    def write_trace(
        self,
        path: str | Path,
        *,
        plan: ChunkPlan | None = None,
        windows: Windows | None = None,
        sent: Sequence[Sent] = (),
    ) -> None:
        """Write this rank's steps and windows in Chrome's trace event format; `evermoe trace` merges such files.

        Times are the time of day, after `gather_windows` that of rank 0. For all ranks at once, with transfers from
        their actual start: `gather_windows(...).trace()`.

        Args:
            path: path of the file, which is replaced atomically.
            plan: result of `plan_chunks` with this rank's windows, to show its chunks.
            windows: windows to show, such as `session.windows`; default: those of these steps.
            sent: transfers to show, `session.sent()` for example.

        Raises:
            ValueError: no step is over yet.
        """
        recorded = self._steps_or_error("write_trace")
        steps: list[StepProfile] = [r.step for r in recorded]
        starts = [r.start + self._to_shared for r in recorded]
        copies = [
            SentChunk(each.start / 1e9 + self._to_shared, (each.end - each.start) / 1e9, *each[2:5]) for each in sent
        ]
        found = windows or find_windows(steps)
        gapless = without_gaps(steps, starts)
        write_atomically(path, chrome_trace(gapless, found, plan, sent=copies, rank=self.rank, start=starts[0]))

    def _steps_or_error(self, who: str) -> list[Recorded]:
        recorded = self.recorded
        if not recorded:
            raise ValueError(
                f"{who}: no step is over yet; call profiler.step() after each, or loop over profiler.steps()"
            )
        return recorded


def _device(model: nn.Module | None, device: torch.device | str | None) -> torch.device:
    if device is not None:
        found = torch.device(device)
    else:
        parameter = None if model is None else next(model.parameters(), None)
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        found = parameter.device if parameter is not None else torch.device("cuda" if in_use else "cpu")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found
