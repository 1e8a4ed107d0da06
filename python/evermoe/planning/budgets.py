"""Budgets of bytes that `moetion` may copy in a step: what the links carry, or a fixed part until measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from evermoe import _native


class Budgets(NamedTuple):
    """Bytes that all members together can copy in a step: bandwidth × time of an iteration (MoEtion, Algorithm 1)."""

    remote: int | None = None
    """To peers; None before all links were measured."""
    local: int | None = None
    """Into the memory of their own nodes; None before all hosts were measured."""


def budgets_of(step_seconds: float, links: Sequence[float | None], hosts: Sequence[float | None]) -> Budgets:
    """Compute the bytes that members can copy in a step from bytes per second.

        >>> budgets_of(0.5, [1e6, 3e6], [None, 1e9])
        Budgets(remote=2000000, local=None)

    Args:
        step_seconds: of the slowest member.
        links: speed of each member's link; None where it was not measured.
        hosts: speed at which each member copies within its host; None where it was not measured.
    """
    return Budgets(_native.copy_budget(step_seconds, links), _native.copy_budget(step_seconds, hosts))


def remote_bytes_per_step(expert_bytes: int, all_bytes: int) -> int:
    """Bytes to peers that `moetion` may send in a step before anything is measured: an eighth of all, or one expert.

    Args:
        expert_bytes: state of the largest expert.
        all_bytes: state of all experts.
    """
    return _native.unmeasured_budget(expert_bytes, all_bytes)
