"""The bubbles of a pipeline's schedule: a profile of its steps, and notices of its transfers to the pacer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from evermoe.comm.courier import Sent
from evermoe.comm.pacer import Pacer
from evermoe.pipeline.stage_windows import StageWindowPlanner
from evermoe.profile import Profiler
from evermoe.profile.follower import StreamFollower
from evermoe.profile.recorder import OpenSpan


class Bubbles:
    """Keeps a profile of the steps since the last recovery.

    Args:
        window_planner: finds windows in it.
        pacer: is notified of the schedule's transfers.
        rank: of the pipeline.
        steps: number of steps that are kept.
        device: of the rank's stage.
    """

    def __init__(
        self, window_planner: StageWindowPlanner, pacer: Pacer, rank: int, steps: int, device: torch.device
    ) -> None:
        self._window_planner, self._pacer, self._rank, self._steps = window_planner, pacer, rank, steps
        self._device = device
        self._follower = StreamFollower() if device.type == "cuda" else None
        self.profiler = self._new_profiler()

    def restart(self, step: int) -> None:
        """Begin a new profile after a recovery, since all ranks must record the same steps.

        Until it is complete the previous windows are used.
        """
        self.profiler.detach()
        self.profiler = self._new_profiler()
        self.profiler.attach()
        self._window_planner.restart(step, True)
        self._pacer.begin_step(self.profiler.began)

    def begin_step(self) -> None:
        """Begin a step in the profile and in the pacer, at the same time."""
        self.profiler.step()
        self._pacer.begin_step(self.profiler.began)

    def _new_profiler(self) -> Profiler:
        profiler = Profiler(device=self._device, keep=max(1, self._steps), rank=self._rank)
        profiler.follow_network(self._transfer_begins, self._transfer_ends)
        self._window_planner.profiler = profiler
        return profiler

    def _transfer_begins(self, span: OpenSpan) -> None:
        if span.kind != "send":  # a receive waits for its sender, and meanwhile the network is idle
            return
        if isinstance(span.start, int):
            self._pacer.transfer_begins()
        elif self._follower is not None:
            self._follower.follow(span.start, lambda at: self._pacer.transfer_begins())

    def _transfer_ends(self, span: OpenSpan) -> None:
        if isinstance(span.end, int):
            self._pacer.transfer_ends(span.name, span.end)
        elif self._follower is not None and span.end is not None:
            self._follower.follow(span.end, functools.partial(self._pacer.transfer_ends, span.name))

    def write_trace(self, path: str | Path, sent: Sequence[Sent]) -> None:
        """Write a trace; see `PipelineSession.write_trace`."""
        self.profiler.write_trace(path, windows=self._window_planner.windows, sent=sent)

    def end(self) -> None:
        """End the profile."""
        self.profiler.detach()
        if self._follower is not None:
            self._follower.close()
