"""Faults of each kind in real jobs, under each preset: what finds them, which member is named, and what is lost.

    python tests/python/support/campaign.py [--kinds KIND …] [--presets auto …] [--clean 10] [--markdown PATH]

Each run is a job of three workers, of which `b` has the fault. An *alarm* is an event of a surviving member that says
that something is wrong, and names a member. A fault is found if its alarm comes, and named if that names `b`. Each
other alarm is a false one, as are all alarms of clean runs. The oracle of `history.py` decides whether the bits of
committed steps are right.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from evermoe.planning.presets import PRESET_NAMES, PresetName  # noqa: E402
from support import disks  # noqa: E402
from support.flips import flip_file  # noqa: E402
from support.harness import SERVER, Job, Worker, wait_until  # noqa: E402
from support.history import check_history, committed_steps  # noqa: E402
from support.hosts import LIGHTHOUSE, Hosts, may_make_hosts  # noqa: E402
from support.worker import Fault  # noqa: E402

AT, STEPS = 16, 24
"""The step of the fault, in whose vote members always compare something, and the steps of a job."""
LONG = 96
"""Steps of a job in which a fault shows after some time."""
CLEAN = 500
"""Steps of a job without a fault."""
STEADY = 48
"""The step of a fault of the network, by which all connections exist."""
DELAY_SECONDS = 0.01
DISK_MEBIBYTES = 2
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
    hosts: Callable[[Hosts], None] | None = None
    """Harms the network of `b`, when `b` comes to the step of the fault; each worker has a host of its own."""
    file: Callable[[Path], None] | None = None
    """Harms a file of the newest checkpoint, with which all workers then start again."""
    copies: bool = False
    """Whether copies and their trainers differ, and a third member says which is wrong."""
    full_disk: bool = False
    """Whether the disk of the checkpoints is full from the step of the fault on, until a member has said so."""


def flip(where: str, point: str = "begin") -> tuple[Fault, ...]:
    """A bit that flips on `b`."""
    return (Fault(point, AT, "flip", where=where),)


def wrong(where: str) -> Kind:
    """Products that are wrong on `b` in each step."""
    return Kind("corruption_found", options={"wrong": where}, steps=LONG, presets=PLACED, replicas=True, leaves=True)


def differ(where: str) -> Kind:
    """Updates of experts with one trainer that are wrong on `b`, or in its copies of others."""
    options, session = {"wrong": where}, {"expert_slots": 1}
    return Kind("corruption_found", options=options, session=session, steps=LONG, presets=REPLAYED, copies=True)


PLACED: tuple[PresetName, ...] = ("auto", "lazarus")
"""Presets with which all members may hold all experts."""
CHECKPOINTS = {"checkpoint_interval": 8}
AGAIN = tuple(Fault("vote", AT, "flip", nth=time, where="gradient") for time in (1, 2))
KINDS = {
    "a dense weight": Kind("corruption_found", flip("dense")),
    "a dense weight, just after its comparison": Kind(
        "corruption_found", (Fault("update", AT, "flip", where="dense"),), steps=LONG
    ),
    "a moment of the optimizer": Kind("corruption_found", flip("moment")),
    "a weight of replicated experts": Kind("corruption_found", flip("active"), replicas=True, presets=PLACED),
    "a summed gradient": Kind("corruption_found", flip("gradient", "vote")),
    "a summed gradient, again when the step is repeated": Kind("corruption_found", AGAIN, leaves=True),
    "products of a dense layer": wrong("head"),
    "products of experts": wrong("expert"),
    "a replica's state": Kind("damaged", flip("state", "vote"), presets=REPLAYED, steps=LONG),
    "a replica's log": Kind("damaged", flip("log", "vote"), presets=REPLAYED, steps=LONG),
    "a step that a replica repeats": Kind("damaged", flip("step", "vote"), presets=REPLAYED, steps=LONG),
    "all steps that a replica repeats": differ("repeats"),
    "all updates of experts with one trainer": differ("optimizer"),
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
    "connections limited to 10 MB/s": Kind("slow_member", (Fault("forward", STEADY, "throttle"),), steps=LONG),
    "a host 10 ms further away": Kind("", hosts=lambda hosts: hosts.delay("b", DELAY_SECONDS)),
    "a host that is cut off": Kind("member_lost", hosts=lambda hosts: hosts.silence("b"), leaves=True),
    "other options than the others'": Kind(
        "",
        options={"session": {"join_interval": 999}},
        session={"quorum_timeout": 10.0},
        says="join_interval is 1000 here, 999 on the other worker",
        ends=True,
    ),
    "a file of a checkpoint with flipped bits": Kind(
        "", session=CHECKPOINTS, file=flip_file, says="a checkpoint is ignored"
    ),
    "half a file of a checkpoint": Kind(
        "",
        session=CHECKPOINTS,
        file=lambda path: os.truncate(path, path.stat().st_size // 2),
        says="a checkpoint is ignored",
    ),
    "a full disk for checkpoints": Kind("", session=CHECKPOINTS, full_disk=True, says="No space left", steps=LONG),
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
    saved = folder / "saved"
    if preset == "pec" or kind.file or kind.full_disk:
        session["checkpoints"] = str(saved)
    with contextlib.ExitStack() as stack:
        if kind.full_disk:
            stack.enter_context(disks.small_disk(saved, DISK_MEBIBYTES))
        job = Job(folder, 3, **session | kind.session)
        stack.callback(job.close)
        if kind.hosts is None:
            workers = start(job, kind, kind.steps)
        else:
            hosts = Hosts(SERVER, "abc")
            stack.callback(hosts.close)
            job.address = f"http://{hosts.address(LIGHTHOUSE)}:{job.address.rsplit(':', 1)[1]}"
            workers = start(job, kind, kind.steps, hosts)
            workers[1].wait_for("share", PATIENCE, step=AT)
            kind.hosts(hosts)
        if kind.full_disk:
            workers[1].wait_for("share", PATIENCE, step=AT)
            disks.fill(saved)
            wait_until(lambda: any(kind.says in each.log() for each in workers), kind.says, PATIENCE)
            disks.free(saved)
        if kind.file is None:
            return judge(kind, workers, end(job, kind, workers))
        end(job, kind, workers)
        newest = max(saved.glob("**/*.safetensors"), key=lambda path: (path.parent.name, path.stat().st_size))
        kind.file(newest)
        again = start(job, kind, kind.steps + AT)
        return judge(kind, again, end(job, kind, again), workers)


def is_allowed(kind: Kind) -> bool:
    """Whether this process may make the hosts or the disk of a kind; both need root."""
    return (kind.hosts is None or may_make_hosts()) and (not kind.full_disk or disks.may_mount())


def start(job: Job, kind: Kind, steps: int, hosts: Hosts | None = None) -> list[Worker]:
    """Starts the three workers."""
    return [
        job.start(
            name,
            *(kind.faults if name == "b" else ()),
            steps=steps,
            call_share=OFTEN,
            network=hosts.network(name) if hosts else None,
            **(kind.options if name == "b" else {}),
        )
        for name in "abc"
    ]


def end(job: Job, kind: Kind, workers: list[Worker]) -> dict[str, int]:
    """Waits for the workers to end; their exit codes."""
    codes = {each.name: each.join(PATIENCE) for each in workers if each.name != "b"}
    victim = workers[1]
    if kind.leaves:
        job.wake()
        victim.process.kill()
    return codes | {"b": victim.join(PATIENCE)}


def judge(kind: Kind, workers: list[Worker], codes: dict[str, int], before: Sequence[Worker] = ()) -> Score:
    """Judges a job by what its workers have recorded, and those that ran `before` them."""
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
    if kind.alarm == "damaged" or kind.copies:
        alarms.discard(("corruption_found", "nobody"))  # they have differed for longer than a third member can repeat
        expected.add("corruption_found")
    if kind.copies:
        alarms = {(event, name) for event, name in alarms if event != "damaged"}  # the copy, whichever is wrong
    false = sorted(f"{event}: {name}" for event, name in alarms if name != "b" or event not in expected)
    found = any(event == kind.alarm for event, _ in alarms) if kind.alarm else True
    named = (kind.alarm, "b") in alarms if kind.alarm else True
    if kind.says:
        found = named = all(kind.says in each.log() for each in others)
    problem = ""
    try:
        check_history([*before, *workers], undone=True, repaired="b")
    except AssertionError as failed:
        problem = str(failed).splitlines()[0]
    done, steps = committed_steps(others), workers[0].options.steps
    if not kind.ends and (done != steps or any(codes[each.name] for each in others)):
        problem = problem or f"ended after {done} steps, exit codes {codes}"
    recovered = [event for each in others for event in each.events("recovered")]
    lost = max((event["steps_lost"] for event in recovered), default=0)
    if before:
        lost = max(lost, committed_steps(before) - min(event["step"] for event in recovered))
    return Score(found, named, lost, false, problem)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS], metavar="KIND")
    parser.add_argument("--presets", nargs="+", choices=PRESET_NAMES, default=list(PRESET_NAMES))
    parser.add_argument("--clean", type=int, default=1, help="clean runs of each preset (%(default)s)")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    options = parser.parse_args()
    rows, failures = [], 0
    clean = {f"nothing, in {CLEAN} steps ({number + 1})": Kind("", steps=CLEAN) for number in range(options.clean)}
    for name, kind in {**clean, **{name: KINDS[name] for name in options.kinds}}.items():
        cells = []
        for preset in options.presets:
            if preset not in kind.presets or not is_allowed(kind):
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
        told = "mended" if kind.faults or kind.hosts else "no alarm"
    told += f", {score.steps_lost} steps lost" if score.steps_lost else ""
    told += f", false: {'; '.join(score.false_alarms)}" if score.false_alarms else ""
    return told + (", wrong" if score.problem else "")


if __name__ == "__main__":
    SERVER.Process(target=int).start()
    sys.exit(main())
