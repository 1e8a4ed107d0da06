"""evermoe: train Mixture-of-Experts models on machines that fail. See `Session`, `MoE` and `ElasticSampler`.

Each name is imported on first use, so that `import evermoe.ops` loads the ops alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evermoe import errors, events, ops, optim, planning, presets, profile, replay, snapshot
    from evermoe.config.checkpoints import Checkpoints
    from evermoe.config.membership import Membership
    from evermoe.config.placement import Placement
    from evermoe.ema import EMA
    from evermoe.environment import local_rank
    from evermoe.errors import (
        CorruptCopy,
        EvermoeError,
        FolderInUse,
        JoinTimeout,
        LeftBehind,
        LostExperts,
        NonFiniteLoss,
        NotReplayable,
        PeerLost,
        TooFewFiles,
        UnequalForwards,
        UnsafeFolder,
        UnsupportedState,
    )
    from evermoe.expert import Expert, clamped_swiglu
    from evermoe.experts import Experts
    from evermoe.loader import ElasticLoader
    from evermoe.moe import MoE, load_balancing_loss, moe_layers, update_balance
    from evermoe.persist.checkpoint import CheckpointWeights, load_weights
    from evermoe.persist.folder_weights import FolderWeights
    from evermoe.router import Router, Routes
    from evermoe.sampler import ElasticSampler, Sampler, Share
    from evermoe.state.deferred import WeightSource, deferred
    from evermoe.train.pipeline import PipelineSession
    from evermoe.train.pipeline_step import PipelineMicroBatch, PipelineStep
    from evermoe.train.session import Session
    from evermoe.train.step import Step
    from evermoe.train.step_gradients import StepGradients

    __version__: str

_HOMES = {
    "CheckpointWeights": "persist.checkpoint",
    "Checkpoints": "config.checkpoints",
    "CorruptCopy": "errors",
    "EMA": "ema",
    "ElasticLoader": "loader",
    "ElasticSampler": "sampler",
    "EvermoeError": "errors",
    "FolderInUse": "errors",
    "JoinTimeout": "errors",
    "LeftBehind": "errors",
    "LostExperts": "errors",
    "Expert": "expert",
    "Experts": "experts",
    "FolderWeights": "persist.folder_weights",
    "Membership": "config.membership",
    "MoE": "moe",
    "Placement": "config.placement",
    "Router": "router",
    "Routes": "router",
    "NonFiniteLoss": "errors",
    "NotReplayable": "errors",
    "PeerLost": "errors",
    "PipelineMicroBatch": "train.pipeline_step",
    "PipelineSession": "train.pipeline",
    "PipelineStep": "train.pipeline_step",
    "Session": "train.session",
    "Sampler": "sampler",
    "Share": "sampler",
    "Step": "train.step",
    "StepGradients": "train.step_gradients",
    "TooFewFiles": "errors",
    "UnequalForwards": "errors",
    "UnsafeFolder": "errors",
    "WeightSource": "state.deferred",
    "deferred": "state.deferred",
    "UnsupportedState": "errors",
    "clamped_swiglu": "expert",
    "load_balancing_loss": "moe",
    "load_weights": "persist.checkpoint",
    "local_rank": "environment",
    "moe_layers": "moe",
    "update_balance": "moe",
}
"""The module of each name."""

__all__ = [
    "EMA",
    "CheckpointWeights",
    "Checkpoints",
    "CorruptCopy",
    "ElasticLoader",
    "ElasticSampler",
    "EvermoeError",
    "Expert",
    "Experts",
    "FolderInUse",
    "FolderWeights",
    "JoinTimeout",
    "LeftBehind",
    "LostExperts",
    "Membership",
    "MoE",
    "NonFiniteLoss",
    "NotReplayable",
    "PeerLost",
    "PipelineMicroBatch",
    "PipelineSession",
    "PipelineStep",
    "Placement",
    "Router",
    "Routes",
    "Sampler",
    "Session",
    "Share",
    "Step",
    "StepGradients",
    "TooFewFiles",
    "UnequalForwards",
    "UnsafeFolder",
    "UnsupportedState",
    "WeightSource",
    "clamped_swiglu",
    "deferred",
    "errors",
    "events",
    "load_balancing_loss",
    "load_weights",
    "local_rank",
    "moe_layers",
    "ops",
    "optim",
    "planning",
    "presets",
    "profile",
    "replay",
    "snapshot",
    "update_balance",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("evermoe")
    elif name in _HOMES:
        value = getattr(import_module(f"evermoe.{_HOMES[name]}"), name)
    elif name in __all__:
        value = import_module(f"evermoe.{name}")
    else:
        raise AttributeError(f"module 'evermoe' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
