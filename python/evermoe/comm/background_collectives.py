"""Collectives of a group of their own that run while the training thread computes: gradients out, weights in.

    training thread     forward ──────── backward ─────────┐ wait
    background thread     └ weights       └ gradients ─────┘

On a GPU they have a stream of their own, too: it waits for what the training stream has launched, and the training
stream waits for it. Members must submit the same collectives in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import nullcontext
from functools import partial
from queue import SimpleQueue

import torch

from evermoe.comm.group import Group
from evermoe.comm.task import Task
from evermoe.errors import PeerLost

Pending = Task["torch.cuda.Event | None"]
"""Collectives in the background; their result is the event of the stream when they are over."""


class BackgroundCollectives:
    """A thread, and on a GPU a stream, for the collectives of a group.

    Args:
        group: the members, for these collectives alone. It may be of one member where `trainers` has several: then
            nothing runs in the background.
        trainers: the same members' group for all other collectives.
        device: device of the tensors.
    """

    def __init__(self, group: Group, trainers: Group, device: torch.device) -> None:
        self._own, self._trainers = group, trainers
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._queue: SimpleQueue[Pending | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        """The same for many steps: each thread's allocations are in an arena of the C library's own."""
        self._latest: Pending | None = None
        """The task that is over when all are."""

    @property
    def is_available(self) -> bool:
        """Whether the members are connected for collectives in the background."""
        return self._own.size == self._trainers.size > 1

    @property
    def group(self) -> Group:
        """The group of the collectives: that of all others where nothing runs in the background."""
        return self._own if self.is_available else self._trainers

    @property
    def finishes_steps(self) -> bool:
        """Whether a step that loses a member runs to its end."""
        return self._trainers.finishes_steps

    def submit(self, work: Callable[[], None]) -> Pending:
        """Run `work` after everything that was submitted before it."""
        event = None if self._stream is None else torch.cuda.current_stream(self._stream.device).record_event()
        task = Task(partial(self._run, work), after=event)
        self._latest = task
        self._queue.put(task)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="evermoe-buckets", daemon=True)
            self._thread.start()
        return task

    def _run(self, work: Callable[[], None]) -> torch.cuda.Event | None:
        try:
            work()
        except PeerLost:
            self._trainers.timed_out = self._trainers.timed_out or self._own.timed_out
            raise
        return None if self._stream is None else self._stream.record_event()

    @torch.no_grad()
    def _work(self) -> None:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            while (task := self._queue.get()) is not None:
                task.run()

    def wait(self, tasks: Collection[Pending]) -> None:
        """Wait for tasks; on a GPU, let the current stream wait for what they have launched.

        Raises:
            PeerLost: a member is lost.
        """
        if not tasks:
            return
        done: list[bool] = []
        self._trainers.on_wait(True)
        try:
            done = [task.wait() for task in tasks]
        finally:
            self._trainers.on_wait(False, bool(done) and all(done))
        if not all(done):
            raise PeerLost(next(task.lost for task in tasks if task.lost is not None))
        for task in tasks:
            if task.result is not None:
                torch.cuda.current_stream().wait_event(task.result)

    def have_succeeded(self) -> bool:
        """Wait for the GPU; return whether all collectives have succeeded."""
        return not self.is_available or self._own.wait_for_collectives()

    def end(self) -> None:
        """Wait until nothing is under way. If something is, the group must have been dropped."""
        if self._latest is not None:
            self._latest.is_over_within(threading.TIMEOUT_MAX)
        self._latest = None

    def close(self) -> None:
        """End the thread."""
        self.end()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
