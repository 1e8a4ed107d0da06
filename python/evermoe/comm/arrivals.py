"""Buckets of gradients that are sent while backward still computes others, and what changes after they were sent.

    backward      ──head──second──first──embedding──┐
    concurrently      └ bucket 0 ── bucket 1 ───────┴ bucket 2

A bucket is sent before its gradients are known to be final: a script may backpropagate again, or change them. What a
step did before is expected of the next one: a bucket is sent once its gradients have arrived in the backward pass that
was the last one of the previous step. What changes nevertheless must be sent again, and then nothing is sent early for
some steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

PATIENT_STEPS = 64
"""Steps in which nothing is sent early after a gradient changed once it was sent."""


class Sent(NamedTuple):
    """The gradient of a parameter when it was sent."""

    parameter: Tensor
    gradient: Tensor | None
    address: int
    """Address of the gradient's memory."""
    version: int

    @classmethod
    def of(cls, parameter: Tensor) -> Sent:
        """Capture the current gradient."""
        gradient = parameter.grad
        if gradient is None:
            return cls(parameter, None, 0, 0)
        return cls(parameter, gradient, _address(gradient), gradient._version)

    @property
    def has_changed(self) -> bool:
        """Whether the current gradient differs from the one that was sent.

        Writes that autograd does not count go unnoticed, such as in-place writes to `gradient.data`.
        """
        gradient = self.parameter.grad
        if gradient is None or gradient is not self.gradient:
            return gradient is not self.gradient
        return gradient._version != self.version or _address(gradient) != self.address


def _address(gradient: Tensor) -> int:
    return gradient.data_ptr() if gradient.layout == torch.strided else 0


class Arrivals:
    """Calls a function for each bucket as soon as backward has computed its gradients.

    Args:
        buckets: parameters `[bucket][n]`, in the order in which they are sent.
        send: called with the number of a bucket and its gradients, in the thread of backward.
    """

    def __init__(self, buckets: Sequence[Sequence[Tensor]], send: Callable[[int, list[Sent]], object]) -> None:
        self._buckets, self._send = buckets, send
        self._hooks = [
            each.register_post_accumulate_grad_hook(partial(self._arrive, number))
            for number, bucket in enumerate(buckets)
            for each in bucket
            if each.requires_grad
        ]
        self._may_send = False
        self._steps = self._patient_until = 0
        """Steps until now, and the first one in which buckets are sent early again."""
        self._backwards = self._backwards_before = 0
        """Backward passes of this step and of the previous one; a bucket is sent once the numbers are equal."""
        self._arrived: list[set[int]] = [set() for _ in buckets]
        """Parameters of each bucket, by their ids, for which the latest backward pass has computed gradients."""
        self._expected = self._arrived
        """The same parameters in the previous step."""
        self.sent: list[list[Sent]] = []
        """Gradients of each bucket that was sent in this step."""

    def begin_step(self, *, may_send: bool = True) -> None:
        """Begin a step, in which buckets `may_send` or not."""
        self._steps += 1
        self._may_send = may_send and self._steps >= self._patient_until
        self._backwards_before, self._backwards = self._backwards, 0
        self._expected, self._arrived = self._arrived, [set() for _ in self._buckets]
        self.sent = []

    def begin_backward(self) -> None:
        """Record that the script begins a backward pass."""
        self._backwards += 1
        self._arrived = [set() for _ in self._buckets]

    def _arrive(self, number: int, parameter: Tensor) -> None:
        self._arrived[number].add(id(parameter))
        if not self._may_send or self._backwards == 0 or self._backwards != self._backwards_before:
            return
        while (following := len(self.sent)) < len(self._buckets):
            arrived, expected = self._arrived[following], self._expected[following]
            if len(arrived) < len(expected) or not arrived.issuperset(expected):
                return
            self.sent.append([Sent.of(each) for each in self._buckets[following]])
            self._send(following, self.sent[following])

    def end_backward(self) -> list[list[Sent]]:
        """Send nothing more in this step, as its gradients are final.

        Returns:
            For each bucket that was sent, the gradients that have changed since.
        """
        changed = [[each for each in sent if each.has_changed] for sent in self.sent]
        # A gradient that did not exist was none to rely on.
        if any(each.gradient is not None for bucket in changed for each in bucket):
            self.wait_some_steps()
        self.stop()
        return changed

    def wait_some_steps(self) -> None:
        """Send nothing early in the next steps, since what was sent in this one was not final."""
        self._patient_until = self._steps + PATIENT_STEPS

    def stop(self) -> None:
        """Send nothing more of this step early, and release the gradients that are kept for that."""
        self._may_send, self.sent = False, []

    def close(self) -> None:
        """Remove the hooks. Calling it again has no effect."""
        self.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
