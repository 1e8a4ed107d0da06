"""Flags of `python -m benches.compare`."""

from __future__ import annotations

import argparse

from benches.compare.candidates import CANDIDATES
from evermoe.demo.flags import parse_kill
from evermoe.demo.worker_flags import add_program_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `python -m benches.compare`."""
    what = parser.add_argument_group("what is compared")
    what.add_argument(
        "--candidate",
        action="append",
        choices=list(CANDIDATES),
        metavar="NAME",
        help=f"candidate to run; repeatable (all: {', '.join(CANDIDATES)})",
    )
    what.add_argument("--workers", type=int, default=4, help="number of processes, each its own node (%(default)s)")
    what.add_argument(
        "--expert-parallel",
        type=int,
        default=2,
        metavar="P",
        help="ranks of one expert-parallel group in ds, ds-ft and nvrx; presets get --experts / P slots, so that each "
        "worker holds the same number of experts (%(default)s)",
    )
    what.add_argument(
        "--replication", type=int, default=2, help="presets: nodes that hold each unit's state (%(default)s)"
    )
    what.add_argument("--expert-slots", type=int, help="presets: expert replicas per worker and layer (--experts / P)")
    what.add_argument(
        "--checkpoint-interval", type=int, default=50, help="ds and nvrx: steps between checkpoints (%(default)s)"
    )
    what.add_argument(
        "--ft-checkpoint-interval",
        type=int,
        default=250,
        help="presets and ds-ft: steps between checkpoints, which they need if all copies are lost (%(default)s)",
    )
    what.add_argument(
        "--hang-timeout", type=float, default=10.0, help="seconds to wait for a silent peer (%(default)s)"
    )
    what.add_argument("--held-out", type=int, default=64, help="samples held out for the final loss (%(default)s)")
    what.add_argument("--limit", type=float, default=600.0, help="maximum seconds of one run (%(default)s)")
    add_program_arguments(parser)
    parser.set_defaults(balance=0.0, steps=100)
    _add_failures(parser)
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="PATH", help="write all figures as JSON")
    results.add_argument("--plot", metavar="PATH", help="draw steps over time, to a PNG or SVG file")
    results.add_argument("--keep", metavar="DIR", help="keep the workers' events and logs here")
    results.add_argument("--memory-dir", default="/dev/shm", help="where shared memory lives (%(default)s)")


def _add_failures(parser: argparse.ArgumentParser) -> None:
    fail = parser.add_argument_group("failures: at steps, at random, or as in a trace")
    fail.add_argument(
        "--kill",
        action="append",
        type=parse_kill,
        metavar="WORKER@STEP",
        help="SIGKILL a worker in the middle of this step, the first time it reaches it; repeatable",
    )
    fail.add_argument("--join", type=int, metavar="STEP", help="add a worker at this step")
    fail.add_argument(
        "--mtbf", type=float, metavar="SECONDS", help="mean time between random failures, drawn by --seed"
    )
    fail.add_argument(
        "--replace-after",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="with --mtbf: seconds from a failure to the start of a new worker (%(default)s)",
    )
    fail.add_argument("--trace", metavar="FILE", help="trace of spot instances, with lines ms,add|remove,node")
    fail.add_argument(
        "--speedup",
        type=float,
        default=1.0,
        help="with --trace: seconds of the trace per second of this run (%(default)s)",
    )
    fail.add_argument("--trace-start", type=float, default=0.0, metavar="SECONDS", help="of --trace (%(default)s)")
