"""Faults of each kind in real jobs, under each preset: what finds them, which member is named, and what is lost.

    python tests/python/support/campaign.py [--kinds KIND …] [--presets auto …] [--clean 10] [--markdown PATH]

Each run is a job of three workers, of which `b` has the fault. An *alarm* is an event of a surviving member that says
that something is wrong, and names a member. A fault is found if its alarm comes, and named if that names `b`. Each
other alarm is a false one, as are all alarms of clean runs. The oracle of `history.py` decides whether the bits of
committed steps are right.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from evermoe.planning.presets import PRESET_NAMES, PresetName  # noqa: E402
from support.harness import SERVER, Job, Worker  # noqa: E402
from support.history import check_history, committed_steps  # noqa: E402
from support.worker import Fault  # noqa: E402

AT, STEPS = 16, 24
"""The step of the fault, in whose vote members always compare something, and the steps of a job."""
LONG = 96
"""Steps of a job in which a fault shows after some time."""
OFTEN = 1e9
"""Part of a step that repeated calls may take: one in each eighth step."""
HANG_SECONDS = 3.0
PATIENCE = 400.0
"""Seconds until a job counts as hung."""
REPLAYED: tuple[PresetName, ...] = ("auto", "moetion")
SNAPSHOTS: tuple[PresetName, ...] = ("gemini", "baft")
ALARMS: dict[str, Callable[[Worker, dict[str, Any]], Iterable[str]]] = {
    "corruption_found": lambda worker, event: event["nodes"] or ["nobody"],
    "member_lost": lambda worker, event: [event["node"]],
    "slow_member": lambda worker, event: [event["node"]],
    "damaged": lambda worker, event: [worker.name],
}
"""By event, the members that it names."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault."""

    alarm: str
    """Event by which it is found; empty: members mend it without one, or `says`."""
    faults: tuple[Fault, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    """Of worker `b`."""
    session: dict[str, Any] = field(default_factory=dict)
    """Of all workers."""
    steps: int = STEPS
    presets: tuple[PresetName, ...] = PRESET_NAMES
    says: str = ""
    """Text in a log of a surviving member that names the fault, in place of an event."""
    ends: bool = False
    """Whether it ends the job on all members."""
    leaves: bool = False
    """Whether `b` ends before the job does."""
    replicas: bool = False
    """Whether all members hold all experts."""


def flip(where: str, point: str = "begin") -> tuple[Fault, ...]:
    """A bit that flips on `b`."""
    return (Fault(point, AT, "flip", where=where),)


def wrong(where: str) -> Kind:
    """Products that are wrong on `b` in each step."""
    return Kind("corruption_found", options={"wrong": where}, steps=LONG, presets=PLACED, replicas=True, leaves=True)


PLACED: tuple[PresetName, ...] = ("auto", "lazarus")
"""Presets with which all members may hold all experts."""
AGAIN = tuple(Fault("vote", AT, "flip", nth=time, where="gradient") for time in (1, 2))
KINDS = {
    "a dense weight": Kind("corruption_found", flip("dense")),
    "a moment of the optimizer": Kind("corruption_found", flip("moment")),
    "a weight of replicated experts": Kind("corruption_found", flip("active"), replicas=True, presets=PLACED),
    "a summed gradient": Kind("corruption_found", flip("gradient", "vote")),
    "a summed gradient, again when the step is repeated": Kind("corruption_found", AGAIN, leaves=True),
    "products of a dense layer": wrong("head"),
    "products of experts": wrong("expert"),
    "a replica's state": Kind("damaged", flip("state", "vote"), presets=REPLAYED, steps=LONG),
    "a replica's log": Kind("damaged", flip("log", "vote"), presets=REPLAYED, steps=LONG),
    "a step that a replica repeats": Kind("damaged", flip("step", "vote"), presets=REPLAYED, steps=LONG),
    "a loss that is not a number": Kind("", options={"poison": {AT: "loss"}}, says="from rank 1 on b", ends=True),
    "a gradient that is not a number": Kind("", options={"poison": {AT: "gradient"}}, says="rank 1 on b", ends=True),
    "killed in forward": Kind("member_lost", (Fault("forward", AT),), leaves=True),
    "killed in a sum": Kind("member_lost", (Fault("reduce", AT),), leaves=True),
    "killed before the vote": Kind("member_lost", (Fault("vote", AT),), leaves=True),
    "killed in the update": Kind("member_lost", (Fault("update", AT),), leaves=True),
    "an exception in the script": Kind("member_lost", (Fault("forward", AT, "raise"),), leaves=True),
    "stopped": Kind("member_lost", (Fault("forward", AT, "stop"),), leaves=True),
    "hung": Kind("member_lost", (Fault("forward", AT, "hang"),), session={"hang_timeout": HANG_SECONDS}, leaves=True),
    "connections closed": Kind("", (Fault("forward", AT, "drop"),)),
    "100 ms slower in each step": Kind("slow_member", options={"slow": 0.1}, steps=LONG),
}


class Score(NamedTuple):
    """Outcome of a run."""

    found: bool
    named: bool
    steps_lost: int
    false_alarms: list[str]
    """Alarms and the members that they name."""
    problem: str
    """Empty if all is as it should be."""


def run(kind: Kind, preset: PresetName, folder: Path) -> Score:
    """Runs a job with a fault, and judges it."""
    session: dict[str, Any] = {"preset": preset, "replication": 2, "rebalance_interval": 0, "join_interval": 1000}
    if kind.replicas:
        session |= {"expert_slots": 10, "min_replicas": 3}
    if preset == "moetion":
        session["remote_bytes_per_step"] = 1 << 30  # or it keeps only few experts' copies
    if preset == "pec":
        session["checkpoints"] = str(folder / "saved")
    job = Job(folder, 3, **session | kind.session)
    try:
        workers = [
            job.start(name, *(kind.faults if name == "b" else ()), steps=kind.steps, call_share=OFTEN, **own)
            for name, own in {"a": {}, "b": kind.options, "c": {}}.items()
        ]
        others = [each for each in workers if each.name != "b"]
        codes = {each.name: each.join(PATIENCE) for each in others}
        victim = workers[1]
        if kind.leaves:
            job.wake()
            victim.process.kill()
        codes["b"] = victim.join(PATIENCE)
        return judge(kind, workers, codes)
    finally:
        job.close()


def judge(kind: Kind, workers: list[Worker], codes: dict[str, int]) -> Score:
    """Judges a job by what its workers have recorded."""
    others = [each for each in workers if each.name != "b"]
    witnesses = workers if kind.alarm == "damaged" else others
    alarms = {
        (event["event"], name)
        for worker in witnesses
        for event in worker.events()
        if event["event"] in ALARMS
        for name in ALARMS[event["event"]](worker, event)
    }
    expected = {kind.alarm, "member_lost"} if kind.leaves else {kind.alarm}
    false = sorted(f"{event}: {name}" for event, name in alarms if name != "b" or event not in expected)
    found = any(event == kind.alarm for event, _ in alarms) if kind.alarm else True
    named = (kind.alarm, "b") in alarms if kind.alarm else True
    if kind.says:
        found = named = all(kind.says in each.log() for each in others)
    problem = ""
    try:
        check_history(workers, undone=True, repaired="b")
    except AssertionError as failed:
        problem = str(failed).splitlines()[0]
    done = committed_steps(others)
    if not kind.ends and (done != kind.steps or any(codes[each.name] for each in others)):
        problem = problem or f"ended after {done} steps, exit codes {codes}"
    lost = max((event["steps_lost"] for each in others for event in each.events("recovered")), default=0)
    return Score(found, named, lost, false, problem)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS], metavar="KIND")
    parser.add_argument("--presets", nargs="+", choices=PRESET_NAMES, default=list(PRESET_NAMES))
    parser.add_argument("--clean", type=int, default=2, help="clean runs of each preset (%(default)s)")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    options = parser.parse_args()
    rows, failures = [], 0
    clean = {f"nothing ({number + 1})": Kind("", steps=LONG) for number in range(options.clean)}
    for name, kind in {**clean, **{name: KINDS[name] for name in options.kinds}}.items():
        cells = []
        for preset in options.presets:
            if preset not in kind.presets:
                cells.append("–")
                continue
            began = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                score = run(kind, preset, Path(folder))
            is_right = score.found and score.named and not score.false_alarms and not score.problem
            failures += not is_right
            cells.append(cell(kind, score))
            print(f"{name}, {preset}: {cells[-1]} {score.problem} in {time.monotonic() - began:.0f} s", flush=True)
        rows.append(f"| {name} | " + " | ".join(cells) + " |")
    head = [f"| fault | {' | '.join(options.presets)} |", "|---" * (len(options.presets) + 1) + "|"]
    table = "\n".join([*head, *rows]) + "\n"
    print(table)
    if options.markdown:
        options.markdown.write_text(table, encoding="utf-8")
    return int(failures > 0)


def cell(kind: Kind, score: Score) -> str:
    """A cell of the table."""
    told = "named" if score.named else "found" if score.found else "missed"
    if not kind.alarm and not kind.says:
        told = "mended" if kind.faults else "no alarm"
    told += f", {score.steps_lost} steps lost" if score.steps_lost else ""
    told += f", false: {'; '.join(score.false_alarms)}" if score.false_alarms else ""
    return told + (", wrong" if score.problem else "")


if __name__ == "__main__":
    SERVER.Process(target=int).start()
    sys.exit(main())
