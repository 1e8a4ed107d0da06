"""Planners: pure functions of plain numbers, the same on every rank that has the same numbers.

Shapes: E experts, N nodes or ranks, L layers. A wrong argument is a ValueError that names it; nothing here
communicates, reads a clock or draws a random number.
"""

from evermoe.planning.copies import copy_holders, primaries, unit_copy_holders
from evermoe.planning.dispatch import SPLITS, SplitPolicy, imbalance, split_tokens
from evermoe.planning.ledger import Starvation, TokenLedger
from evermoe.planning.migrate import Migration, migrate
from evermoe.planning.placement import POLICIES, FewerReplicas, Placement, PlacementPolicy, Reason, allocate, place
from evermoe.planning.recovery import RecoveryPlan, recovery_plan
from evermoe.planning.selection import select_experts, shard_modules
from evermoe.planning.sizes import CopySize, ModelSize, checkpoint_bytes

__all__ = [
    "POLICIES",
    "SPLITS",
    "CopySize",
    "FewerReplicas",
    "Migration",
    "ModelSize",
    "Placement",
    "PlacementPolicy",
    "Reason",
    "RecoveryPlan",
    "SplitPolicy",
    "Starvation",
    "TokenLedger",
    "allocate",
    "checkpoint_bytes",
    "copy_holders",
    "imbalance",
    "migrate",
    "place",
    "primaries",
    "recovery_plan",
    "select_experts",
    "shard_modules",
    "split_tokens",
    "unit_copy_holders",
]
