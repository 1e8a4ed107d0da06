"""Flags of `evermoe plan`. This module imports neither torch nor rich, so that `--help` is quick."""

from __future__ import annotations

import argparse

from evermoe.cli.plan.fit import add_fit_arguments
from evermoe.cli.plan.loads import FORMS
from evermoe.cli.plan.setting import add_copy_arguments
from evermoe.planning.placement import POLICIES

DESCRIPTION = """\
Compare placements of experts before a run, or for the load of a running one: how evenly each policy loads the nodes,
how likely every expert survives when nodes fail at once, and which policy to take. With --copies, also show how each
expert would be protected, and the cost. With --model, show instead how much memory each worker needs, whether it fits,
and on how many nodes. Nothing is started or trained.

  evermoe plan --nodes 32 --expert-slots 9 --experts 256 --layers 58 --load zipf:1.0 --fail 1..4
  evermoe plan --nodes 32 --expert-slots 18 --load counts.npy --domain-size 4 --plot plan.png --json plan.json
  evermoe plan --nodes 32 --expert-slots 9 --experts 256 --layers 58 --load zipf:1.0 --copies --network-idle 0.4
  evermoe plan --model mixtral-8x7b --nodes 4 --workers-per-node 8 --memory 80GB"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `evermoe plan`."""
    parser.description = DESCRIPTION
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--nodes", type=int, help="number of machines, which fail independently")
    cluster.add_argument(
        "--expert-slots",
        type=int,
        help="expert replicas of each MoE layer that a node holds; with --model: that a worker holds (a session's "
        "default)",
    )
    cluster.add_argument(
        "--domain-size",
        type=int,
        default=1,
        metavar="NODES",
        help="number of consecutive nodes, such as a rack, that fail together; --fail then counts racks (%(default)s)",
    )
    model = parser.add_argument_group("model and load")
    model.add_argument("--experts", type=int, help="experts of each layer; a --load file defines it")
    model.add_argument("--layers", type=int, help="MoE layers; a --load file defines it (default: 1)")
    model.add_argument(
        "--load",
        default="uniform",
        metavar="LOAD",
        help=f"tokens of each expert: {FORMS}. hot:87@2 gives two experts 87 %% of the tokens. Files hold a row of "
        "experts, or a row for each layer (%(default)s)",
    )
    model.add_argument(
        "--seed",
        type=int,
        default=0,
        help="seed of a synthetic load, in which each layer has its own hot experts (%(default)s)",
    )
    asked = parser.add_argument_group("requirements")
    asked.add_argument(
        "--min-replicas", type=int, help="replicas that every expert should have (2; with --model the preset's)"
    )
    asked.add_argument(
        "--fail",
        metavar="F",
        help="numbers of simultaneous losses to examine: 2, or 1..4, or 1,3 (default: 1..3)",
    )
    asked.add_argument(
        "--policy", action="append", choices=POLICIES, help="plan with this policy only; repeatable (default: all)"
    )
    add_copy_arguments(parser)
    add_fit_arguments(parser)
    results = parser.add_argument_group("results")
    results.add_argument("--plot", metavar="PNG", help="draw survival by losses and imbalance by policy, to a PNG")
    results.add_argument(
        "--json",
        metavar="FILE",
        help="write everything as JSON: load, replicas, placements, results and advice, or the memory",
    )
