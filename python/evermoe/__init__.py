"""evermoe: train Mixture-of-Experts models on machines that fail. See `Session`, `MoE` and `ElasticSampler`."""

import os

os.environ.setdefault("RUST_LOG", "warn")  # torchft reads it when it is imported, and logs every quorum otherwise

from evermoe import ops, optim, profile, replay
from evermoe.checkpoint import load_weights
from evermoe.config import SessionConfig
from evermoe.data import ElasticSampler, Share
from evermoe.errors import CorruptCopy, EvermoeError, JoinTimeout, LostExperts, NotReplayable, PeerLost
from evermoe.moe import MoE, load_balancing_loss, moe_layers
from evermoe.pipeline import PipelineCopies
from evermoe.report import RecoveryReport
from evermoe.session import Session
from evermoe.step import Step
from evermoe.units import UnsupportedState

__version__ = "0.1.0"

__all__ = [
    "CorruptCopy",
    "ElasticSampler",
    "EvermoeError",
    "JoinTimeout",
    "LostExperts",
    "MoE",
    "NotReplayable",
    "PeerLost",
    "PipelineCopies",
    "RecoveryReport",
    "Session",
    "SessionConfig",
    "Share",
    "Step",
    "UnsupportedState",
    "load_balancing_loss",
    "load_weights",
    "moe_layers",
    "ops",
    "optim",
    "profile",
    "replay",
]
