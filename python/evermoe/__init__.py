"""evermoe: train Mixture-of-Experts models on machines that fail. See `Session`, `MoE` and `ElasticSampler`.

Each name is imported on first use, so that `import evermoe.ops` loads the ops alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evermoe import errors as errors
    from evermoe import events as events
    from evermoe import observe as observe
    from evermoe import ops as ops
    from evermoe import optim as optim
    from evermoe import planning as planning
    from evermoe import presets as presets
    from evermoe.config.checkpoints import Checkpoints
    from evermoe.config.membership import Membership
    from evermoe.config.placement import Placement
    from evermoe.environment import local_rank
    from evermoe.expert import Expert
    from evermoe.experts import Experts
    from evermoe.loader import ElasticLoader
    from evermoe.moe import MoE, load_balancing_loss
    from evermoe.persist.checkpoint import CheckpointWeights, load_weights
    from evermoe.persist.folder_weights import FolderWeights
    from evermoe.router import Router
    from evermoe.sampler import ElasticSampler
    from evermoe.state.deferred import deferred
    from evermoe.train.pipeline import PipelineSession
    from evermoe.train.session import Session
    from evermoe.train.step import Step
    from evermoe.train.step_gradients import StepGradients

    __version__: str

_HOMES = {
    "CheckpointWeights": "persist.checkpoint",
    "Checkpoints": "config.checkpoints",
    "ElasticLoader": "loader",
    "ElasticSampler": "sampler",
    "Expert": "expert",
    "Experts": "experts",
    "FolderWeights": "persist.folder_weights",
    "Membership": "config.membership",
    "MoE": "moe",
    "Placement": "config.placement",
    "Router": "router",
    "PipelineSession": "train.pipeline",
    "Session": "train.session",
    "Step": "train.step",
    "StepGradients": "train.step_gradients",
    "deferred": "state.deferred",
    "load_balancing_loss": "moe",
    "load_weights": "persist.checkpoint",
    "local_rank": "environment",
}
"""The module of each name."""
_MODULES = ("errors", "events", "observe", "ops", "optim", "planning", "presets")
"""Public modules besides `integrations`."""

__all__ = [
    "CheckpointWeights",
    "Checkpoints",
    "ElasticLoader",
    "ElasticSampler",
    "Expert",
    "Experts",
    "FolderWeights",
    "Membership",
    "MoE",
    "PipelineSession",
    "Placement",
    "Router",
    "Session",
    "Step",
    "StepGradients",
    "deferred",
    "load_balancing_loss",
    "load_weights",
    "local_rank",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        value: object = version("evermoe")
    elif name in _HOMES:
        value = getattr(import_module(f"evermoe.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"evermoe.{name}")
    else:
        raise AttributeError(f"module 'evermoe' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES, "__version__"})
