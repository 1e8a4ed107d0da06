"""Faults while copies travel: in a pipeline's rank, and where gradients are sent to replicas."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from evermoe.copies.replay.early_gradients import EarlyGradients
from evermoe.pipeline.step_contents import StepContents
from evermoe.state.version import step_of

FAULT = "EVERMOE_TEST_FAULT"
"""Of the environment: one of `FAULTS`, and for all but the last the steps of the version that it befalls."""


def _flip(data) -> None:
    """A bit of a number's exponent: one of its last would be lost in an update's rounding, now and then."""
    data[len(data) // 8 * 4 + 3] ^= 0x10


def _befall(version: int, where: str) -> None:
    """In the keeper's memory of the previous version, or in the step's message: a bit of it, or all of its head."""
    repeat = StepContents._repeat

    def repeat_damaged(self, sent, kept, known):
        if step_of(sent.version) == version:
            if where == "memory":
                for index, _ in kept.arena.versions():
                    _flip(kept.arena.buffer(index))
            elif where == "message":
                _flip(self._data[kept.number])
            else:
                first = kept.arena.units()[0][1]
                self._data[kept.number][first : first + 64] = 77
        return repeat(self, sent, kept, known)

    StepContents._repeat = repeat_damaged


def _train_by_amsgrad() -> None:
    torch.optim.AdamW = functools.partial(torch.optim.AdamW, amsgrad=True)


FAULTS = {
    "memory": lambda version: _befall(version, "memory"),
    "message": lambda version: _befall(version, "message"),
    "head": lambda version: _befall(version, "head"),
    "amsgrad": lambda _: _train_by_amsgrad(),
}


def install(fault: str) -> None:
    """In this process: `memory 4`, for example."""
    name, _, version = fault.partition(" ")
    FAULTS[name](int(version or 0))


def before_early_gradients(notify: Callable[[], object]) -> None:
    """Call `notify` in this process before each bucket of gradients is sent to replicas during backward."""
    send = EarlyGradients._send

    def telling(*arguments):
        notify()
        send(*arguments)

    EarlyGradients._send = telling


class Killer(deque):
    """A courier's list of what it has sent; the first message of a marked version is the end of this process.

    Args:
        folder: of the job, in which ranks that die together let each other know that they have come to it.
        rank: this one.
        other: another rank that dies in its copy, too; None where this one dies alone.
    """

    def __init__(self, folder: str, rank: int, other: int | None) -> None:
        super().__init__(maxlen=4096)
        self.marked, self._folder, self._rank, self._other = False, Path(folder), rank, other

    def append(self, sent: Any) -> None:
        super().append(sent)
        if self.marked:
            (self._folder / f"in-copy-{self._rank}").touch()
            while self._other is not None and not (self._folder / f"in-copy-{self._other}").exists():
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)
