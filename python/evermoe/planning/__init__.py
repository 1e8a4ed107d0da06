"""Planners: pure functions of plain numbers, the same on every rank that has the same numbers.

Shapes: E experts, N nodes or ranks, L layers. A wrong argument raises a ValueError that names it. No planner
communicates, reads a clock or draws a random number.
"""

from evermoe.planning.choose_copies import CopyNode, CopyUnit, choose_copies
from evermoe.planning.dispatch import split_tokens
from evermoe.planning.migrate import migrate
from evermoe.planning.placement import allocate, place
from evermoe.planning.schedule import Link
from evermoe.planning.survival import recovery_probability

__all__ = [
    "CopyNode",
    "CopyUnit",
    "Link",
    "allocate",
    "choose_copies",
    "migrate",
    "place",
    "recovery_probability",
    "split_tokens",
]
