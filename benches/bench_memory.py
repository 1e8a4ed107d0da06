"""Peak memory of workers at the start, in steps and in a recovery, compared with `evermoe plan --model`.

    python benches/bench_memory.py [--settings none auto gemini] [--dense replicated sharded] [--json PATH]

The workers are real processes on one machine, one of which is killed mid-step. A peak is the largest PSS of a worker's
process, less that of a process that has only imported torch. It excludes shared memory, which is measured by the files
of the copies. The largest peak of the workers is compared with the planner's.

`none` keeps no copies: instead each expert trains on two workers, which have twice the slots. With a sharded optimizer,
dense modules then have no second owner, so that no worker is killed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import evermoe
from bench_start import Model, Watch
from evermoe.events import Begin, ConnectionLost, CoverageChanged, Event
from evermoe.planning.footprint import PHASES, footprint
from evermoe.planning.seating import FootprintOptions
from evermoe.presets import BY_NAME, ReplayedCopies
from evermoe.state.model_shape import shape_of

SIZES = {"layers": 3, "hidden": 512, "intermediate": 1024, "experts": 24, "vocabulary": 8192}
SETTINGS = {
    "none": {"preset": "lazarus", "copies": 0, "replicas": 2},
    "auto": {"preset": "auto", "copies": 2, "replicas": 1},
    "gemini": {"preset": "gemini", "copies": 2, "replicas": 1},
}


def model_of(options: argparse.Namespace) -> Model:
    return Model(*(getattr(options, name) for name in SIZES))


def session_options(options: argparse.Namespace, name: str, dense: str) -> dict[str, Any]:
    """Return the options of the planner."""
    setting = SETTINGS[name]
    slots = -(-options.experts * setting["replicas"] // options.workers)
    log = options.log_mib << 20
    preset = "auto" if name == "none" and dense == "sharded" else setting["preset"]
    chosen = {
        "preset": preset,
        "replication": setting["copies"],
        "expert_slots": slots,
        "min_replicas": setting["replicas"],
    }
    return chosen | {"shard_optimizer": dense == "sharded", "replay_log_bytes": log}


def session_arguments(options: argparse.Namespace, name: str, dense: str) -> dict[str, Any]:
    """Return the same options for a session."""
    found = session_options(options, name, dense)
    preset = BY_NAME[found["preset"]]
    log = {"replay_log_bytes": found["replay_log_bytes"]} if issubclass(preset, ReplayedCopies) else {}
    return {
        "preset": preset(**log),
        "replication": found["replication"],
        "placement": evermoe.Placement(expert_slots=found["expert_slots"], min_replicas=found["min_replicas"]),
        "shard_optimizer": found["shard_optimizer"],
    }


def has_recovery(name: str, dense: str) -> bool:
    """Return whether the job survives the loss of a worker."""
    return bool(SETTINGS[name]["copies"]) or dense == "replicated"


# ---- a worker


def work(options: argparse.Namespace) -> None:
    """Train one worker, which is killed or recovers, and print its measurements."""
    torch.set_num_threads(1)
    watch = Watch("start", options.empty)

    def listen(event: Event) -> None:
        if isinstance(event, ConnectionLost):
            watch.begin("recovery")
        elif isinstance(event, Begin) and watch.phase == "start":
            watch.begin("step")
        elif isinstance(event, CoverageChanged) and event.is_complete and watch.phase == "recovery":
            watch.begin("after")  # by now the copies exist that are made during the repeated step

    with evermoe.deferred():
        model = model_of(options)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    sampler = evermoe.ElasticSampler(64, batch_size=12)
    session = evermoe.Session(
        model, optimizer, sampler, on_event=listen, **session_arguments(options, options.setting, options.as_dense)
    )
    data = torch.randint(options.vocabulary, (64, 9), generator=torch.Generator().manual_seed(0))
    arenas = 0
    for step in session.steps(options.steps):
        own = list(session._store.directory.glob(f"*{session._membership.id}.arena"))
        arenas = arenas or sum(path.stat().st_blocks * 512 for path in own)
        with step:
            tokens = data[step.indices]
            step.backward(nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))
            is_last = session.group.rank == session.group.size - 1
            if step.number == options.kill_at and session.group.size == options.workers and is_last:
                report(watch, arenas)
                os.kill(os.getpid(), signal.SIGKILL)
    report(watch, arenas)


def report(watch: Watch, arenas: int) -> None:
    print("RESULT " + json.dumps({"arenas": arenas} | watch.stop()) + " END", flush=True)


# ---- the driver


@contextmanager
def empty_process() -> Iterator[int]:
    """Yield the id of a process that has only imported torch."""
    code = "import sys, torch; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate()


def run(options: argparse.Namespace, setting: str, dense: str) -> dict[str, int]:
    """Return the largest peak of all workers by phase."""
    own = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in (*SIZES, "workers", "steps", "log_mib")]
    with empty_process() as empty:
        job = ["--workers", str(options.workers), "--job", f"bench-memory-{os.getpid()}"]
        worker = ["--worker", f"--empty={empty}", f"--setting={setting}", f"--as-dense={dense}"]
        command = [sys.executable, "-m", "evermoe", "run", *job, __file__, *worker]
        kill_at = options.kill_at if has_recovery(setting, dense) else options.steps
        done = subprocess.run(
            [*command, *own, f"--kill-at={kill_at}"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=options.limit,
            check=False,
        )
    said = [json.loads(each) for each in re.findall(r"RESULT (\{[^}]*\}) END", done.stdout)]
    survivors = options.workers - 1 if has_recovery(setting, dense) else 0
    if len(said) != options.workers or sum("recovery" in each for each in said) != survivors:
        raise SystemExit(f"{setting}, {dense}: a worker did not end as expected:\n{done.stdout}{done.stderr}")
    return {name: max(each.get(name, 0) for each in said) for name in (*PHASES, "arenas")}


def planned(options: argparse.Namespace, setting: str, dense: str) -> dict[str, dict[str, int]]:
    """Return the planner's memory of the largest worker, by phase."""
    with torch.device("meta"):
        shape = shape_of(model_of(options))
    chosen = FootprintOptions(workers=options.workers, weights="float32", **session_options(options, setting, dense))
    found = footprint(shape, chosen, is_roomy=True)
    peaks = {phase: found.peak(phase, lambda use: use.process)[1] for phase in PHASES}
    return {phase: use._asdict() | {"process": use.process, "share": use.share} for phase, use in peaks.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--dense", nargs="+", choices=["replicated", "sharded"], default=["replicated", "sharded"])
    for name, size in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--log-mib", type=int, default=256, help="replay_log_bytes of auto (%(default)s)")
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--kill-at", type=int, default=11, help="step in which the last worker is killed (%(default)s)")
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--empty", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    parser.add_argument("--as-dense", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    rows = []
    print("MiB: share; shared memory, planned and measured; then for each phase planned, measured, and their ratio")
    for setting in options.settings:
        for dense in options.dense:
            expected, found = planned(options, setting, dense), run(options, setting, dense)
            parts = [
                f"{phase} {expected[phase]['process'] >> 20:5} {found[phase] >> 20:5} "
                f"{found[phase] / expected[phase]['process']:.2f}"
                for phase in PHASES
                if found[phase]
            ]
            copies = f"{expected['step']['snapshots'] >> 20:5} {found['arenas'] >> 20:5}"
            print(
                f"{setting:7} {dense:10} {expected['step']['share'] >> 20:5} {copies}  {'  '.join(parts)}", flush=True
            )
            rows.append({"setting": setting, "dense": dense, "planned": expected, "found": found})
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
