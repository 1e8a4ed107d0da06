"""Seconds from SIGKILL to the repeated step with a large state, compared with the time of the link alone.

    python benches/bench_recovery.py [--rounds 5] [--spare | --join] [--layers 4] [--json PATH]

Each round runs `evermoe demo` with three workers, which have 1.7 GB of state in total, and kills one of them mid-step.
Directly afterwards, one pair of members sends as many bytes as a survivor has fetched. The goal is 0.8 s plus 1.5 times
the time of the pair.

With `--spare` each round is two runs instead, in alternating order: in one a spare replaces the killed worker, and in
the other the remaining two continue without it. The table shows seconds from SIGKILL until the members resume, and
until the first survivor has taken the next step, including the copies that it waits for.

With `--join` each round is a run of three workers that a fourth one joins. The table shows, for a previous member, the
time without a step ("halt": from the agreement on the newcomer until the next step begins), and by how much the
interval between two updates exceeds the usual one ("pause", which includes waits for copies in the next step). Both are
also shown in steps of the four. The goal is a pause of one step.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

from bench_transport import pair, timed_once
from common import Table, run_ranks
from evermoe.launch import LocalJob
from evermoe.process.reports import Reports

SIZES = {"layers": 4, "hidden": 512, "intermediate": 2048, "experts": 16, "batch": 6, "sequence": 64}
PHASES = ("detect", "agree", "rebuild", "fetch", "verify")
"""Phases of a recovery before the step is repeated."""
FIXED_SECONDS, SLOWER = 0.8, 1.5
STEPS_AFTER = 6
"""Steps to wait for once a newcomer is a member."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=float, default=300.0, help="maximum seconds of one run (%(default)s)")
    parser.add_argument("--spare", action="store_true", help="compare recoveries with and without a spare")
    parser.add_argument("--join", action="store_true", help="measure a join in place of a kill")
    parser.add_argument("--layers", type=int, default=SIZES["layers"], help="layers of the model (%(default)s)")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    SIZES["layers"] = arguments.layers
    if arguments.spare:
        compare_spares(arguments)
        return
    if arguments.join:
        time_joins(arguments)
        return
    columns = dict.fromkeys(PHASES, "8.3f")
    columns |= {"total": "8.2f", "MB": "6.0f", "GB/s": "6.2f", "goal": "6.2f", "of goal": "8.2f", "repeat": "7.2f"}
    table = Table("Seconds of each phase; bytes that one survivor fetched, and the throughput of one pair", columns)
    for _ in range(arguments.rounds):
        table.add(**measure(arguments.limit))
    for name in columns:
        print(f"{name}: median {statistics.median(row[name] for row in table.rows):.3f}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table.rows, indent=2) + "\n")


def measure(limit):
    """Measure one run, and one pair. Return a row."""
    with tempfile.TemporaryDirectory() as folder:
        options = [f"--{name}={size}" for name, size in SIZES.items()]
        options += ["--workers=3", "--steps=12", "--kill=2@6", "--no-join", "--no-baseline"]
        outputs = [f"--json={folder}/summary", f"--plot={folder}/plot.png"]
        command = [sys.executable, "-m", "evermoe", "demo", *options, *outputs]
        subprocess.run(command, check=True, capture_output=True, timeout=limit)
        (episode,) = json.loads(Path(f"{folder}/summary").read_text())["episodes"]
        fetched = episode["fetched_bytes"] // episode["members"]
        seconds, _ = run_ranks(_measure_pair, 2, fetched)
    parts = episode["seconds"]
    row = {phase: parts[phase] for phase in PHASES}
    goal = FIXED_SECONDS + SLOWER * seconds
    row |= {"total": sum(row.values()), "MB": fetched / 1e6, "GB/s": fetched / seconds / 1e9, "goal": goal}
    return row | {"of goal": row["total"] / goal, "repeat": parts["repeat"]}


def compare_spares(arguments):
    """Measure rounds of two runs each, with a spare and without."""
    columns = {"spare": "<5", "members": "7", **dict.fromkeys(PHASES[1:], "8.3f")}
    columns |= {"resumed": "8.2f", "next step": "9.2f", "MB": "6.0f"}
    table = Table("Seconds of each phase, and since SIGKILL; bytes that all members fetched", columns)
    for number in range(arguments.rounds):
        for has_spare in (number % 2 == 0, number % 2 == 1):
            table.add(**replace_worker(has_spare, arguments.limit))
    for spare in ("yes", "no"):
        rows = [row for row in table.rows if row["spare"] == spare]
        for name in ("resumed", "next step", "MB"):
            print(f"spare {spare}, {name}: median {statistics.median(row[name] for row in rows):.3f}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table.rows, indent=2) + "\n")


def replace_worker(has_spare, limit):
    """Run three workers and kill one of them. Return a row."""
    members = (0, 1, 3) if has_spare else (0, 1)
    with tempfile.TemporaryDirectory() as folder:
        with _workers(folder) as (job, reports):
            if has_spare:
                _start(job, reports, 3, role="spare")
                _wait_for(reports, 3, "stands_by", limit)
            _wait_for(reports, 0, "commit", limit, after=time.time())
            job.workers[2].process.kill()
            killed = time.time()
            for index in members:
                _wait_for(reports, index, "recovered", limit, after=killed)
            _wait_for(reports, 0, "commit", limit, after=killed)
        after = {index: [each for each in reports.events[index] if each["time"] > killed] for index in members}
    recovered = [next(each for each in events if each["event"] == "recovered") for events in after.values()]
    commits = [each["time"] for each in after[0] if each["event"] == "commit"]
    row = {"spare": "yes" if has_spare else "no", "members": recovered[0]["members"]}
    row |= {phase: statistics.median(each["seconds"][phase] for each in recovered[:2]) for phase in PHASES[1:]}
    row |= {"resumed": max(each["time"] for each in recovered) - killed, "next step": commits[0] - killed}
    return row | {"MB": sum(each["fetched_bytes"] for each in recovered) / 1e6}


def time_joins(arguments):
    """Measure rounds of one run each."""
    columns = dict.fromkeys(PHASES[1:], "8.3f")
    columns |= {
        "step": "6.2f",
        "halt": "6.2f",
        "pause": "6.2f",
        "halt/step": "9.2f",
        "pause/step": "10.2f",
        "MB": "6.0f",
    }
    table = Table("Seconds of each phase, and of a step; bytes that the newcomer fetched while all waited", columns)
    for _ in range(arguments.rounds):
        table.add(**add_worker(arguments.limit))
    for name in columns:
        print(f"{name}: median {statistics.median(row[name] for row in table.rows):.3f}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table.rows, indent=2) + "\n")


def add_worker(limit):
    """Run three workers that a fourth one joins. Return a row."""
    with tempfile.TemporaryDirectory() as folder:
        with _workers(folder) as (job, reports):
            _wait_for(reports, 0, "commit", limit)
            begun = time.time()
            _start(job, reports, 3)
            _wait_for(reports, 0, "recovered", limit, after=begun)
            for _ in range(STEPS_AFTER):
                _wait_for(reports, 0, "update", limit, after=time.time())
        events, theirs = reports.events[0], reports.events[3]
    joined = next(event for event in events if event["event"] == "recovered" and event["time"] > begun)
    resumed, updates = joined["time"], [event["time"] for event in events if event["event"] == "update"]
    before, after = [when for when in updates if when < resumed], [when for when in updates if when > resumed]
    agreed = max(e["time"] for e in events if e.get("phase") == "agree" and e["time"] < resumed)
    began = next(event["time"] for event in events if event["event"] == "begin" and event["time"] > resumed)
    step = statistics.median(end - start for start, end in itertools.pairwise(after))
    halt, pause = began - agreed, after[0] - before[-1] - step
    row = {phase: joined["seconds"][phase] for phase in PHASES[1:]} | {"step": step, "halt": halt, "pause": pause}
    fetched = next(event["fetched_bytes"] for event in theirs if event["event"] == "recovered")
    return row | {"halt/step": halt / step, "pause/step": pause / step, "MB": fetched / 1e6}


@contextlib.contextmanager
def _workers(folder):
    """Start a job in which three workers train. All its processes end with the context."""
    options = [f"--{name}={size}" for name, size in SIZES.items()]
    command = [sys.executable, "-m", "evermoe.demo.train", *options, "--steps=1000"]
    reports = Reports(Path(folder))
    job = LocalJob(command, f"bench-{uuid.uuid4().hex[:8]}", 3, environment={"OMP_NUM_THREADS": "1"})
    try:
        with job:
            for index in range(3):
                _start(job, reports, index)
            yield job, reports
    finally:
        job.remove_memory()


def _start(job, reports, index, role="train"):
    events = reports.add(index)
    with reports.log(index).open("w") as log:
        job.start(index, f"node-{index}", f"--events={events}", role=role, stdout=log, stderr=log)


def _wait_for(reports, worker, name, limit, after=0.0):
    end = time.monotonic() + limit
    while not any(each["event"] == name and each["time"] > after for each in reports.events[worker]):
        if time.monotonic() > end:
            raise TimeoutError(f"no {name} of worker {worker} within {limit:g} s")
        time.sleep(0.1)
        reports.read()


def _measure_pair(rank, folder, nbytes):
    with pair(rank, folder) as members:
        return timed_once(members, nbytes)


if __name__ == "__main__":
    main()
