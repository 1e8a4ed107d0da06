"""Gradients that are summed at their owners while backward still computes others.

    backward         ──head──second──first──embedding──┐
    concurrently        └ bucket 0 ── bucket 1 ────────┴ bucket 2 ── VOTE

Sums begin before the gradients are known to be final: a script may backpropagate again, or change them. So a bucket's
sum counts only if no member has changed a gradient of it since; otherwise all members reduce it again.

Members begin the same buckets in the same order, in a group of their own: the exchanges of the MoE layers, which
continue meanwhile, have another. The gradients of the latest step, on which all agree, decide what a bucket holds.
A missing gradient is sent as zeros after backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from evermoe.comm.collectives import buckets, reduce_to_owners
from evermoe.comm.group import Group
from evermoe.comm.task import Task
from evermoe.errors import PeerLost
from evermoe.planning.footprint import BUCKET_BYTES


class _Sent:
    """The gradients `[owner][n]` of a bucket that were sent, and whether they have changed since.

    Args:
        parameters_R: of the bucket, by owner.
        rank: of this member, whose own gradients are copied: their sums are written to the copies.
    """

    def __init__(self, parameters_R: Sequence[Sequence[Tensor]], rank: int) -> None:
        self._seen = [(p, p.grad, None if p.grad is None else p.grad._version) for ps in parameters_R for p in ps]
        self.gradients_R = [[torch.zeros_like(p) if p.grad is None else p.grad for p in ps] for ps in parameters_R]
        self.gradients_R[rank] = [gradient.clone() for gradient in self.gradients_R[rank]]

    def is_changed(self) -> bool:
        """Return whether a gradient has changed; writes to `gradient.data` are not seen."""
        return any(p.grad is not g or (g is not None and g._version != version) for p, g, version in self._seen)


class EarlySums:
    """Sums gradients at their owners in buckets, in a background thread during backward.

    Args:
        group: of those that train, for these sums alone; of one member where nothing is summed early.
        trainers: those members' group for all else.
    """

    def __init__(self, group: Group, trainers: Group) -> None:
        self._group, self._trainers = group, trainers
        self._buckets: list[list[list[Tensor]]] = []
        """Parameters of each bucket, by owner."""
        self._planned: list[list[int]] = []
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._backwards = self._backwards_before = 0
        """Backpropagations of this step and of the previous one: a bucket is sent after the previous step's number."""
        self._missing: list[int] = []
        """Gradients of each bucket that the current backpropagation has not computed yet."""
        self._sent: list[_Sent] = []
        self._tasks: list[Task[None]] = []
        self._queue: SimpleQueue[Task[None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        """The same for many steps: each thread's allocations are in an arena of the C library's own."""

    def plan(self, parameters_R: Sequence[Sequence[Tensor]]) -> None:
        """Plan the buckets for the gradients that the next step will probably have; the same on all members.

        Buckets have about equal bytes of each owner, and the last parameters first, as backward reaches them first.
        """
        planned = [[id(parameter) for parameter in parameters] for parameters in parameters_R]
        if self._group.size == 1 or planned == self._planned:
            return
        self.forget()
        self._planned = planned
        self._buckets = buckets([list(reversed(parameters)) for parameters in parameters_R], BUCKET_BYTES)
        for number, bucket in enumerate(self._buckets):
            for parameter in (parameter for parameters in bucket for parameter in parameters):
                self._hooks.append(parameter.register_post_accumulate_grad_hook(self._hook(number)))

    def forget(self) -> None:
        """Sum nothing early until it is planned again."""
        self.end()
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        for hook in self._hooks:
            hook.remove()
        self._buckets, self._planned, self._hooks = [], [], []

    def begin_step(self) -> None:
        """Record that the script begins to compute a step."""
        self.end()
        self._backwards_before, self._backwards = self._backwards, 0

    def begin_backward(self) -> None:
        """Record that the script begins to backpropagate a loss."""
        self._backwards += 1
        self._missing = [sum(map(len, bucket)) for bucket in self._buckets]

    def _hook(self, number: int) -> Callable[[Tensor], None]:
        return partial(self._arrived, number)

    def _arrived(self, number: int, _: Tensor) -> None:
        if self._backwards == 0 or self._backwards != self._backwards_before:
            return
        self._missing[number] -= 1
        while len(self._sent) < len(self._buckets) and self._missing[len(self._sent)] <= 0:
            self._send_next()

    @torch.no_grad()
    def _send_next(self) -> None:
        sent = _Sent(self._buckets[len(self._sent)], self._group.rank)
        task = Task(partial(self._sum, sent.gradients_R))
        self._sent.append(sent)
        self._tasks.append(task)
        self._queue.put(task)
        if self._thread is None:
            self._thread = threading.Thread(target=_work, args=[self._queue], name="evermoe-sums", daemon=True)
            self._thread.start()

    def _sum(self, gradients_R: Sequence[Sequence[Tensor]]) -> None:
        try:
            reduce_to_owners(gradients_R, self._group)
        except PeerLost:
            self._trainers.timed_out = self._trainers.timed_out or self._group.timed_out
            raise

    def send_rest(self) -> list[bool]:
        """Begin the other buckets after backward. Return per bucket whether this member's gradients have changed."""
        changed = [sent.is_changed() for sent in self._sent]
        while len(self._sent) < len(self._buckets):
            self._send_next()
        return changed + [False] * (len(self._sent) - len(changed))

    def finish(self, is_changed: Sequence[bool]) -> set[int]:
        """Wait for all sums, put those of unchanged buckets in place at their owners, and return their parameters' ids.

        Args:
            is_changed: per bucket, whether any member's gradients have changed.

        Raises:
            PeerLost: a member is gone.
        """
        if not self._sent:
            return set()
        self._trainers.on_wait(True)
        done = [task.wait() for task in self._tasks]
        self._trainers.on_wait(False, all(done))
        if not all(done):
            raise PeerLost(next(task.lost for task in self._tasks if task.lost is not None))
        summed = set()
        rank = self._group.rank
        for bucket, sent, changed in zip(self._buckets, self._sent, is_changed, strict=True):
            if changed:
                continue
            for parameter, gradient in zip(bucket[rank], sent.gradients_R[rank], strict=True):
                if parameter.grad is not None:  # some member has one
                    parameter.grad = gradient
            summed |= {id(parameter) for parameters in bucket for parameter in parameters}
        self.end()
        return summed

    def end(self) -> None:
        """Wait until nothing is summed. If sums are under way, the group must have been dropped."""
        for task in self._tasks:
            task.is_over_within(threading.TIMEOUT_MAX)
        self._sent, self._tasks = [], []


@torch.no_grad()
def _work(queue: SimpleQueue[Task[None] | None]) -> None:
    while (task := queue.get()) is not None:
        task.run()
