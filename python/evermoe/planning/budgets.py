"""Budgets of bytes that `moetion` may copy in a step: the capacity of the links, or a fixed part until measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evermoe import _native


class Budgets(NamedTuple):
    """Bytes that all members together can copy in a step: bandwidth × time of an iteration (MoEtion, Algorithm 1)."""

    remote: int | None = None
    """To peers; None before a link was measured."""
    local: int | None = None
    """Into the memory of their own nodes; None before a host was measured."""


def budgets_of(step_seconds: float, links: Sequence[float | None], hosts: Sequence[float | None]) -> Budgets:
    """Compute the bytes that members can copy in a step from bytes per second.

    A member without a measurement has sent too little for one, perhaps for good. It counts with the slowest measured
    speed.

        >>> budgets_of(0.5, [1e6, 3e6, None], [None, None, None])
        Budgets(remote=2500000, local=None)

    Args:
        step_seconds: of the slowest member.
        links: speed of each member's link; None where it was not measured.
        hosts: speed at which each member copies within its host; None where it was not measured.
    """
    return Budgets(*(_native.copy_budget(step_seconds, _completed(speeds)) for speeds in (links, hosts)))


def _completed(speeds: Sequence[float | None]) -> list[float | None]:
    slowest = min((speed for speed in speeds if speed is not None), default=None)
    return [slowest if speed is None else speed for speed in speeds]


def remote_bytes_per_step(expert_bytes: int, all_bytes: int) -> int:
    """Bytes to peers that `moetion` may send in a step before a link is measured: an eighth of all, or one expert.

    A slow start: copies that a link cannot carry prolong steps, and a budget for long steps would keep them long.

    Args:
        expert_bytes: state of the largest expert.
        all_bytes: state of all experts.
    """
    return _native.unmeasured_budget(expert_bytes, all_bytes)
