"""Flags of `evermoe demo`, and their checks."""

from __future__ import annotations

import argparse
from pathlib import Path

from evermoe.config.flags import as_flags, given_preset
from evermoe.demo.worker_flags import add_arguments as add_worker_arguments
from evermoe.demo.worker_flags import session_arguments
from evermoe.options import checked
from evermoe.planning.presets import PRESETS, levels
from evermoe.presets import Moetion, Pec

SIZES = ("layers", "hidden", "heads", "intermediate", "experts", "top_k", "sequence")
"""Flags that set the size of the model and of its samples."""
MOST = 1 << 20
"""Largest value of a flag that counts something."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `evermoe demo`."""
    show = parser.add_argument_group("failures and joins")
    show.add_argument("--workers", type=int, default=4, help="number of processes, each its own node (%(default)s)")
    show.add_argument(
        "--kill",
        action="append",
        type=parse_kill,
        metavar="RANK@STEP",
        help="SIGKILL a worker in the middle of this step, and remove its node's memory; repeatable (2@20). A kill in "
        "the step after an interrupted one strikes during the recovery. With moetion and pec, which may lose "
        "tokens, --expert-slots has its minimum by default: most experts then train on one worker alone, and the kill "
        "shows what such a preset loses. The links of one machine carry all experts in a step: with moetion add "
        "--moetion.remote-bytes-per-step",
    )
    show.add_argument("--no-kill", action="store_true", help="kill no worker")
    show.add_argument(
        "--join",
        type=int,
        metavar="STEP",
        help="step at which a new worker joins (default: 2/3 of --steps)",
    )
    show.add_argument("--no-join", action="store_true", help="admit no new worker")
    show.add_argument(
        "--no-baseline",
        action="store_true",
        help="skip the run without failures, whose losses are the reference",
    )
    add_worker_arguments(parser)
    results = parser.add_argument_group("results")
    results.add_argument("--json", metavar="PATH", help="write the summary as JSON")
    results.add_argument(
        "--plot", metavar="PATH", default="evermoe-demo.png", help="draw the run to this PNG file (%(default)s)"
    )
    results.add_argument(
        "--trace", metavar="PATH", help="write a trace of the last steps of all workers, for ui.perfetto.dev"
    )
    results.add_argument("--events", metavar="DIR", help="keep the workers' events and logs here")
    results.add_argument("--memory-dir", default="/dev/shm", help="where shared memory lives (%(default)s)")


def parse_kill(text: str) -> tuple[int, int]:
    """Parse `RANK@STEP` to (rank, step)."""
    try:
        rank, step = text.split("@")
        return int(rank), int(step)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected RANK@STEP, e.g. 2@20, got {text!r}") from None


def check(options: argparse.Namespace) -> dict[int, int]:
    """Check all flags. Return the kills as worker → step.

    Raises:
        ValueError: with the flag, what was expected and what came.
    """
    kills = [] if options.no_kill else options.kill or ([(2, 20)] if options.workers > 2 else [])
    workers = [worker for worker, _ in kills]
    check_numbers(options)
    for worker, step in kills:
        if not 0 <= worker < options.workers or not 0 <= step < options.steps:
            raise ValueError(
                f"--kill {worker}@{step}: expected a rank below {options.workers} and a step below {options.steps}"
            )
    if len(set(workers)) != len(workers):
        raise ValueError(f"--kill: a worker dies only once, got {workers}")
    if len(workers) >= options.workers:
        raise ValueError(
            f"--kill: expected at least one survivor of {options.workers} workers, got {len(workers)} kills"
        )
    from evermoe.demo.corpus import read_text  # torch takes seconds to import, and --help needs none of it

    read_text(options.data)
    if options.expert_slots is None and options.min_replicas is None and PRESETS[options.preset].may_lose_tokens:
        options.expert_slots = 1  # the fewest that hold all experts
    if options.join is None:
        options.join = options.steps * 2 // 3
    if not options.no_join and not 0 <= options.join < options.steps:
        raise ValueError(f"--join: expected a step below {options.steps}, got {options.join}")
    return dict(kills)


def check_numbers(options: argparse.Namespace) -> None:
    """Refuse values that a worker would refuse, before any of them starts."""
    for name in ("workers", "steps", "batch", *SIZES):
        checked(f"--{name.replace('_', '-')}", getattr(options, name), int, least=1, most=MOST)
    checked("--balance", options.balance, float, least=0, most=MOST)
    from evermoe.session.session_config import session_config  # as above

    given = session_arguments(argparse.Namespace(**vars(options) | {"checkpoints": options.checkpoints or "anywhere"}))
    session_config(**given, seed=options.seed)


def worker_arguments(options: argparse.Namespace, steps: int, replication: int, folder: Path) -> list[str]:
    """Return the flags of each worker of a run; `replication` is 0 for the run without failures."""
    training = ("balance", "batch", "learning_rate", "seed", "hang_timeout", "rejoin_timeout", "checkpoint_interval")
    values = {name: getattr(options, name) for name in (*SIZES, *training)} | {"steps": steps}
    values["replication"] = replication
    values["preset"] = options.preset if replication else "auto"
    if replication and (options.checkpoints or PRESETS[options.preset].needs_checkpoint_dir):
        values["checkpoints"] = options.checkpoints or folder / "store"
    for name in ("data", "expert_slots", "min_replicas", "placement"):
        if getattr(options, name) is not None:
            values[name] = getattr(options, name)
    flags = [part for name, value in values.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return [*flags, *(as_flags(given_preset(options)) if replication else [])]


def copied_at_a_time(options: argparse.Namespace) -> str:
    """Return what a preset that may lose tokens copies at a time, in words."""
    preset = given_preset(options)
    if preset.choices.takes_turns:
        given = preset.group(Pec)
        each = levels(options.experts, given.experts_per_snapshot, given.experts_per_save)
        often = "step" if given.save_interval == 1 else f"{given.save_interval} steps"
        return (
            f"{preset.name} saves {each.save} of {options.experts} experts of each layer each {often}; snapshots of "
            f"{each.snapshot} are in their own node's memory, and lost with it"
        )
    budget = preset.group(Moetion).remote_bytes_per_step
    most = "the capacity of the links in" if budget is None else f"{budget:,} bytes"
    return f"{preset.name} brings copies on other nodes up to date for {most} a step, the most tokens first"
