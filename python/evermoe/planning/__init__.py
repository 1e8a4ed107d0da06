"""Planners: pure functions of plain numbers, the same on every rank that has the same numbers.

Shapes: E experts, N nodes or ranks, L layers. A wrong argument is a ValueError that names it; nothing here
communicates, reads a clock or draws a random number.
"""

from evermoe.planning.copies import copy_holders, primaries, unit_copy_holders
from evermoe.planning.dispatch import imbalance, split_tokens
from evermoe.planning.migrate import Migration, migrate
from evermoe.planning.placement import allocate, place
from evermoe.planning.recovery import RecoveryPlan, recovery_plan

__all__ = [
    "Migration",
    "RecoveryPlan",
    "allocate",
    "copy_holders",
    "imbalance",
    "migrate",
    "place",
    "primaries",
    "recovery_plan",
    "split_tokens",
    "unit_copy_holders",
]
