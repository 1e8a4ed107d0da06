"""Planners: pure functions of plain numbers, the same on every rank that has the same numbers.

Shapes: E experts, N nodes or ranks, L layers. A wrong argument is a ValueError that names it; nothing here
communicates, reads a clock or draws a random number. When to copy is in modules of its own:
`evermoe.planning.windows`, `schedule` and `trace`.
"""

from evermoe.planning.choose_copies import (
    CopyNode,
    CopyPlan,
    CopyUnit,
    Holder,
    LossSurvival,
    NodeUse,
    UnitChoice,
    choose_copies,
)
from evermoe.planning.dispatch import SPLITS, SplitPolicy, imbalance, split_tokens
from evermoe.planning.holders import TrainingCopies, copy_holders, primaries, training_copy_holders, unit_copy_holders
from evermoe.planning.ledger import Starvation, TokenLedger
from evermoe.planning.load import LoadAverage
from evermoe.planning.migrate import Migration, keep_in_place, migrate
from evermoe.planning.owners import place_owners
from evermoe.planning.placement import (
    POLICIES,
    FewerReplicas,
    Placement,
    PlacementPolicy,
    Reason,
    allocate,
    failure_domains,
    is_worth_moving,
    place,
    session_slots,
    spread_over,
)
from evermoe.planning.presets import PRESET_NAMES, PRESETS, Preset, PresetName
from evermoe.planning.recovery import RecoveryPlan, recovery_plan, usable_holdings
from evermoe.planning.save_shares import save_shares
from evermoe.planning.selection import select_experts, select_per_rank, shard_modules
from evermoe.planning.sizes import CopySize, ModelSize, checkpoint_bytes
from evermoe.planning.survival import Survival, copy_recovery_probability, recovery_probability

__all__ = [
    "POLICIES",
    "PRESETS",
    "PRESET_NAMES",
    "SPLITS",
    "CopyNode",
    "CopyPlan",
    "CopySize",
    "CopyUnit",
    "FewerReplicas",
    "Holder",
    "LoadAverage",
    "LossSurvival",
    "Migration",
    "ModelSize",
    "NodeUse",
    "Placement",
    "PlacementPolicy",
    "Preset",
    "PresetName",
    "Reason",
    "RecoveryPlan",
    "SplitPolicy",
    "Starvation",
    "Survival",
    "TokenLedger",
    "TrainingCopies",
    "UnitChoice",
    "allocate",
    "checkpoint_bytes",
    "choose_copies",
    "copy_holders",
    "copy_recovery_probability",
    "failure_domains",
    "imbalance",
    "is_worth_moving",
    "keep_in_place",
    "migrate",
    "place",
    "place_owners",
    "primaries",
    "recovery_plan",
    "recovery_probability",
    "save_shares",
    "select_experts",
    "select_per_rank",
    "session_slots",
    "shard_modules",
    "split_tokens",
    "spread_over",
    "training_copy_holders",
    "unit_copy_holders",
    "usable_holdings",
]
