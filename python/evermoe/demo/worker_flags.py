"""Flags of the demo's workers. This module does not import torch, so that `--help` is quick."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from evermoe.planning import POLICIES, PRESET_NAMES

COPY_FLAGS: Mapping[str, tuple[type, str, str]] = MappingProxyType(
    {
        "experts_per_snapshot": (int, "K", "pec: experts of each layer of a snapshot in their node's memory (half)"),
        "experts_per_save": (int, "K", "pec: experts of each layer that are saved to --checkpoint-dir (a quarter)"),
        "snapshot_interval": (
            int,
            "STEPS",
            "pec: steps between snapshots (1); gemini, baft: steps of a version (as needed)",
        ),
        "save_interval": (int, "STEPS", "pec: steps between saves (1)"),
        "expert_selection": (str, "ORDER", "pec: load-aware, or sequential, in turn (load-aware)"),
        "max_lost_token_fraction": (
            float,
            "PORTION",
            "pec: fraction of lost tokens above which more experts are saved (1.0)",
        ),
        "remote_bytes_per_step": (
            int,
            "BYTES",
            "moetion: bytes to peers, all workers together (capacity of the links in a step)",
        ),
        "local_bytes_per_step": (int, "BYTES", "moetion: bytes to the experts' own nodes"),
        "local_snapshot_interval": (
            int,
            "STEPS",
            "steps between snapshots in own memory (as few as --copy-budget allows; not pec)",
        ),
        "copy_budget": (float, "SHARE", "share of a step by which copies may prolong it (0.01)"),
    }
)
"""Options of a session about what is copied and how often: type, name of the value, and help."""
OPTIONS = (
    "preset",
    "copies",
    "slots",
    "min_replicas",
    "placement",
    "hang_timeout",
    "rejoin_timeout",
    "checkpoint_interval",
    *COPY_FLAGS,
)
"""Flags that are options of the session under the same names."""


def session_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options that were given or have a default in the demo."""
    return {name: getattr(options, name) for name in OPTIONS if getattr(options, name) is not None}


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
    """Add the flags of protection; `run` is the group of flags about training."""
    run.add_argument("--preset", choices=PRESET_NAMES, default="auto", help="how the state is protected (%(default)s)")
    run.add_argument(
        "--slots",
        type=int,
        help="expert replicas per worker and layer (default: the fewest that hold all experts, plus one; in evermoe "
        "demo "
        "with moetion and pec the fewest)",
    )
    run.add_argument(
        "--placement", choices=POLICIES, help="placement policy of experts on workers (default: the preset's)"
    )
    run.add_argument(
        "--min-replicas", type=int, help="least replicas of each expert (default: 1; --copies with lazarus)"
    )
    run.add_argument("--copies", type=int, default=2, help="nodes that hold each unit's state; 0: none (%(default)s)")
    run.add_argument("--hang-timeout", type=float, default=10.0, help="seconds to wait for a silent peer (%(default)s)")
    run.add_argument("--rejoin-timeout", type=float, default=5.0, help="seconds to wait for lost copies (%(default)s)")
    run.add_argument("--checkpoint-dir", metavar="DIR", help="write checkpoints here (default: none)")
    run.add_argument("--checkpoint-interval", type=int, default=0, help="steps between checkpoints (%(default)s)")
    copying = parser.add_argument_group("what presets copy, and how often (default: as in a session)")
    for name, (kind, metavar, text) in COPY_FLAGS.items():
        copying.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)
