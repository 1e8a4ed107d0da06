"""Flags of the demo's workers. This module does not import torch, so that `--help` is quick."""

from __future__ import annotations

import argparse
from typing import Any

from evermoe.config.checkpoints import Checkpoints
from evermoe.config.copies import CopyConfig
from evermoe.config.flags import add_flags, add_preset_flags, given_options, given_preset
from evermoe.config.membership import Membership
from evermoe.config.placement import Placement

MEMBERSHIP = {"hang_timeout": 10.0, "rejoin_timeout": 5.0}
"""Options of `Membership` that have flags, and their defaults."""


def session_arguments(options: argparse.Namespace, **membership: Any) -> dict[str, Any]:
    """Return the arguments of `evermoe.Session` that the flags give; `membership`: further fields of it.

    Raises:
        ValueError: one is wrong, or is one of another preset.
    """
    return {
        "preset": given_preset(options),
        "replication": options.replication,
        "membership": given_options(options, Membership, **membership),
        "placement": given_options(options, Placement),
        "checkpoints": given_options(options, Checkpoints),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags that this script and `evermoe demo` share."""
    run = add_program_arguments(parser)
    add_session_arguments(parser, run)


def add_program_arguments(parser: argparse.ArgumentParser) -> Any:
    """Add the sizes of model and run; return the group of flags about training."""
    model = parser.add_argument_group("model and data")
    model.add_argument("--data", metavar="PATH", help="a text file or a folder (default: the Python standard library)")
    model.add_argument("--layers", type=int, default=4, help="transformer blocks, each with an MoE layer (%(default)s)")
    model.add_argument("--hidden", type=int, default=128, help="width of a token (%(default)s)")
    model.add_argument("--heads", type=int, default=4, help="attention heads (%(default)s)")
    model.add_argument("--intermediate", type=int, default=256, help="inner width of an expert (%(default)s)")
    model.add_argument("--experts", type=int, default=8, help="experts per MoE layer (%(default)s)")
    model.add_argument("--top-k", type=int, default=2, help="experts per token (%(default)s)")
    model.add_argument("--sequence", type=int, default=128, help="bytes per sample (%(default)s)")
    model.add_argument(
        "--balance", type=float, default=0.01, help="weight of the routers' load-balancing loss (%(default)s)"
    )
    run = parser.add_argument_group("training")
    run.add_argument("--steps", type=int, default=60, help="steps to commit (%(default)s)")
    run.add_argument("--batch", type=int, default=24, help="samples per step over all workers (%(default)s)")
    run.add_argument("--learning-rate", type=float, default=3e-3, help="learning rate of AdamW (%(default)s)")
    run.add_argument("--seed", type=int, default=0, help="seed of weights and sampling (%(default)s)")
    return run


def add_session_arguments(parser: argparse.ArgumentParser, run: Any) -> None:
    """Add the options of the session; `run`: the group of flags about training."""
    add_flags(run, CopyConfig, ["replication"], {"replication": 2})
    add_flags(run, Membership, [*MEMBERSHIP], MEMBERSHIP)
    add_flags(run, Placement, ["expert_slots", "min_replicas", "policy"])
    add_flags(run, Checkpoints, ["url", "interval"], {"interval": 0})
    add_preset_flags(parser)
