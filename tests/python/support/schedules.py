"""Random schedules of failures, one after the other, judged by what the workers have recorded.

    python tests/python/support/schedules.py --runs 200

A seed gives a schedule (`plan`). Its preset is the seed's remainder. Then come, from one source of random numbers: 4 or
5 workers; whether there are checkpoints on the way; one of `mishaps.MISHAPS` (a single mishap, or, two times out of
three, several); and for each mishap the worker, the step and the point. Cuts of the network and full disks are real
ones, which need the rights to make network namespaces and to mount. Without them a run is not done, and says so; with
`--unprivileged` the seed draws on until a schedule needs none.

The oracle knows nothing of how a session works: every sample is used exactly once, no committed step is repeated, equal
versions have equal bits, losses are those of a run without mishaps, every exit is one that the documentation gives, the
last step is in a checkpoint, and nothing hangs. If no member is lost, nobody recovers.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from evermoe.checkpoint.checkpoint_folder import find  # noqa: E402
from evermoe.planning.presets import PRESET_NAMES  # noqa: E402
from evermoe.state.version import step_of  # noqa: E402
from support import disks  # noqa: E402
from support.harness import SERVER, Job  # noqa: E402
from support.history import check_history, committed_steps  # noqa: E402
from support.hosts import LIGHTHOUSE, Hosts, may_make_hosts  # noqa: E402
from support.mishaps import CHECKPOINT_EVERY, HANG_LIMIT, MISHAPS, STEPS, Schedule  # noqa: E402

DISK_MEBIBYTES = 4
LOSES_TOKENS = ("pec", "moetion")
TOLERANCE = 1e-3
"""Losses differ by so much, relatively: sums over other numbers of workers are rounded otherwise."""
RIGHTS = {"hosts": ("make network namespaces", may_make_hosts), "disk": ("mount file systems", disks.may_mount)}


class MissingRights(Exception):
    """This process may not do what a schedule needs."""


def plan(seed: int, *, unprivileged: bool = False) -> Schedule:
    """The schedule of a seed; `unprivileged`: the first of its schedules that needs no rights."""
    draw = random.Random(seed)
    preset = PRESET_NAMES[seed % len(PRESET_NAMES)]
    names = "abcde"[: draw.choice([4, 4, 5])]
    copies = 2 if preset == "pec" else 3  # which refuses more
    options: dict[str, Any] = {
        "preset": preset,
        "replication": copies,
        "hang_timeout": HANG_LIMIT,
        "rejoin_timeout": 3.0,
    }
    options["quorum_timeout"] = 30.0
    options["checkpoint_interval"] = draw.choice([0, CHECKPOINT_EVERY])
    while True:
        drawn = draw.choice(draw.choice(MISHAPS))
        made = Schedule(draw, names, preset, dict(options), drawn)
        if not (unprivileged and made.needs):
            return made


@functools.cache
def undisturbed() -> list[float]:
    """Losses by step of a run to which nothing happens."""
    with tempfile.TemporaryDirectory() as folder:
        job = Job(Path(folder), 2)
        try:
            workers = job.start_all({}, "ab", steps=STEPS)
            assert [each.join() for each in workers] == [0, 0]
            return [event["loss"] for event in workers[0].events("commit")]
        finally:
            job.close()


def run(seed: int, folder: Path, *, unprivileged: bool = False) -> str:
    """Runs the schedule of a seed and checks it; returns what happened.

    Raises:
        AssertionError: a rule is broken; the text begins with what was to happen.
        MissingRights: this process may not do what is to happen.
    """
    made = plan(seed, unprivileged=unprivileged)
    told = f"seed {seed}, {made.preset}, {len(made.names)} workers: {'; '.join(made.told)}"
    missing = [what for what, is_allowed in (RIGHTS[each] for each in sorted(made.needs)) if not is_allowed()]
    if missing:
        raise MissingRights(f"{told}: this process may not {' and '.join(missing)}")
    made.saved = folder / "saved"
    try:
        with contextlib.ExitStack() as stack:
            _start(made, folder, stack)
            for act in made.acts:
                act()
            _check(made)
    except AssertionError as failed:
        raise AssertionError(f"{told}\n{failed}") from failed
    return told


def _start(made: Schedule, folder: Path, stack: contextlib.ExitStack) -> None:
    """Makes what the schedule needs, all of which goes with the stack, and starts the workers."""
    if "disk" in made.needs:
        stack.enter_context(disks.small_disk(made.saved, DISK_MEBIBYTES))
    if "hosts" in made.needs:
        made.hosts = Hosts(SERVER, [*made.names, "z"])
        stack.callback(made.hosts.close)
    made.job = Job(folder, len(made.names), **made.options, checkpoints=str(made.saved))
    stack.callback(made.job.close)
    if made.hosts is not None:
        made.job.address = f"http://{made.hosts.address(LIGHTHOUSE)}:{made.job.address.rsplit(':', 1)[1]}"
    for name in made.names:
        made.workers[name] = made.start(name, *made.faults[name])


def _check(made: Schedule) -> None:
    _check_exits(made)
    workers = list(made.workers.values())
    check_history(workers, away=made.away)
    assert committed_steps(workers) == STEPS
    assert _is_saved(made), f"the last step is in no checkpoint: {find(made.saved)}"
    if not made.codes:
        for name in made.names:
            assert not made.workers[name].events("connection_lost"), (
                f"{name} lost a member, and nothing happened to any"
            )
    if made.preset not in LOSES_TOKENS:
        expected = undisturbed()
        for event in (event for each in workers for event in each.events("commit")):
            assert math.isclose(event["loss"], expected[event["step"]], rel_tol=TOLERANCE), event


def _check_exits(made: Schedule) -> None:
    """Each worker ends as it should; where a full disk ends the job, its memory remains for the next start."""
    for each in made.workers.values():
        each.join()
    ends = (0,) if not made.stays_full or _is_saved(made) else (1,)
    for name, each in made.workers.items():
        code, expected = each.join(), made.codes.get(name, ends)
        assert code in expected, f"{name} ended with {code}, expected one of {expected}\n{each.log()}"
        if code == 1:
            error = each.events("failed")[0]["error"]
            errors = made.errors.get(name, ("LeftBehind",) if name in made.codes else ("PersistFailed",))
            assert error in errors, f"{name} ended with {error}, expected one of {errors}\n{each.log()}"
    if ends == (1,):
        disks.free(made.saved)
        again = {f"{name} again": made.start(name) for name in made.names}
        for name, each in again.items():
            assert each.join() == 0, f"{name} ended with {each.join()}\n{each.log()}"
        made.workers |= again


def _is_saved(made: Schedule) -> bool:
    return STEPS in map(step_of, find(made.saved))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--unprivileged", action="store_true", help="draw on where a schedule needs rights that this process may lack"
    )
    options = parser.parse_args()
    failures = 0
    for seed in range(options.first_seed, options.first_seed + options.runs):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                told = run(seed, Path(folder), unprivileged=options.unprivileged)
                print(f"{told}: right in {time.monotonic() - began:.0f} s", flush=True)
            except AssertionError as failed:
                failures += 1
                print(f"WRONG: {failed}", flush=True)
            except MissingRights as missing:
                failures += 1
                print(f"NOT DONE: {missing}; --unprivileged draws another schedule", flush=True)
    print(f"{options.runs} runs, {failures} wrong or not done")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
