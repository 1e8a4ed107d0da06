"""Planners: pure functions of plain numbers, the same on every rank that has the same numbers.

Shapes: E experts, N nodes or ranks, L layers. A wrong argument is a ValueError that names it; nothing here
communicates, reads a clock or draws a random number.
"""

from evermoe.planning.copies import (
    TrainingCopies,
    copy_holders,
    primaries,
    training_copy_holders,
    unit_copy_holders,
)
from evermoe.planning.dispatch import split_tokens
from evermoe.planning.placement import allocate, place
from evermoe.planning.recovery import RecoveryPlan, recovery_plan
from evermoe.planning.survival import Survival, copy_recovery_probability, recovery_probability

__all__ = [
    "RecoveryPlan",
    "Survival",
    "TrainingCopies",
    "allocate",
    "copy_holders",
    "copy_recovery_probability",
    "place",
    "primaries",
    "recovery_plan",
    "recovery_probability",
    "split_tokens",
    "training_copy_holders",
    "unit_copy_holders",
]
