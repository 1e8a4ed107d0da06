"""evermoe: train Mixture-of-Experts models on machines that fail. See `Session`, `MoE` and `ElasticSampler`.

Each name is imported on first use, so that `import evermoe.ops` loads the ops alone.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evermoe import data as data
    from evermoe import errors as errors
    from evermoe import events as events
    from evermoe import observe as observe
    from evermoe import ops as ops
    from evermoe import optim as optim
    from evermoe import planning as planning
    from evermoe import presets as presets
    from evermoe.checkpoint.checkpoint import CheckpointWeights, load_weights
    from evermoe.checkpoint.folder_weights import FolderWeights
    from evermoe.config.checkpoints import Checkpoints
    from evermoe.config.environment import local_rank
    from evermoe.config.membership import Membership
    from evermoe.config.placement import Placement
    from evermoe.data.loader import ElasticLoader
    from evermoe.data.readers import ElasticReaders
    from evermoe.data.sampler import ElasticSampler
    from evermoe.moe.expert import Expert
    from evermoe.moe.experts import Experts
    from evermoe.moe.layer import MoE, load_balancing_loss
    from evermoe.moe.router import Router
    from evermoe.moe.routing import Routing, record_routing, replay_routing
    from evermoe.pipeline.pipeline import PipelineSession
    from evermoe.session.session import Session
    from evermoe.session.step import Step
    from evermoe.session.step_gradients import StepGradients
    from evermoe.state.deferred import deferred

    __version__: str

_HOMES = {
    "CheckpointWeights": "checkpoint.checkpoint",
    "Checkpoints": "config.checkpoints",
    "ElasticLoader": "data.loader",
    "ElasticReaders": "data.readers",
    "ElasticSampler": "data.sampler",
    "Expert": "moe.expert",
    "Experts": "moe.experts",
    "FolderWeights": "checkpoint.folder_weights",
    "Membership": "config.membership",
    "MoE": "moe.layer",
    "Placement": "config.placement",
    "Router": "moe.router",
    "PipelineSession": "pipeline.pipeline",
    "Routing": "moe.routing",
    "Session": "session.session",
    "Step": "session.step",
    "StepGradients": "session.step_gradients",
    "deferred": "state.deferred",
    "load_balancing_loss": "moe.layer",
    "load_weights": "checkpoint.checkpoint",
    "local_rank": "config.environment",
    "record_routing": "moe.routing",
    "replay_routing": "moe.routing",
}
"""The module of each name."""
_MODULES = ("data", "errors", "events", "observe", "ops", "optim", "planning", "presets")
"""Public modules besides `integrations`."""

__all__ = [
    "CheckpointWeights",
    "Checkpoints",
    "ElasticLoader",
    "ElasticReaders",
    "ElasticSampler",
    "Expert",
    "Experts",
    "FolderWeights",
    "Membership",
    "MoE",
    "PipelineSession",
    "Placement",
    "Router",
    "Routing",
    "Session",
    "Step",
    "StepGradients",
    "deferred",
    "load_balancing_loss",
    "load_weights",
    "local_rank",
    "record_routing",
    "replay_routing",
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
