"""Random schedules of failures, one after the other, judged by what the workers have recorded.

    python tests/python/support/schedules.py --runs 200

Each run draws from its seed a preset, 4 or 5 workers and one or two mishaps. They are survivable by construction: three
nodes hold each unit's state, and two workers at most are out of the job at a time. The oracle knows nothing of how a
session works: every sample is used exactly once, no committed step is repeated, equal versions have equal bits, losses
are those of a run without mishaps, every exit code is the expected one, and nothing hangs.
"""

from __future__ import annotations

import argparse
import functools
import math
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from evermoe.planning import PRESET_NAMES  # noqa: E402
from support.harness import Job, Worker, wait_until  # noqa: E402
from support.history import check_history, committed_steps  # noqa: E402
from support.worker import Fault  # noqa: E402

STEPS = 36
SLOW = 0.1
"""Seconds that each step takes at least, so that what is to happen during the run does."""
HANG_LIMIT = 4.0
POINTS = ("forward", "reduce", "vote", "update", "copy", "commit")
PHASES = ("agree", "rebuild", "fetch", "verify")
LOSES_TOKENS = ("pec", "moetion")
TOLERANCE = 1e-3
"""Losses differ by so much, relatively: sums over other numbers of workers are rounded otherwise."""
PROPER, KILLED, LEFT = (0,), (-signal.SIGKILL,), (143,)
LATE = (0, 1)
"""A worker that comes back finds its job, or that it is over."""


@dataclass
class Run:
    """A job, and what is expected of it."""

    job: Job
    draw: random.Random
    workers: dict[str, Worker] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    codes: dict[str, Collection[int]] = field(default_factory=dict)
    away: set[str] = field(default_factory=set)
    acts: list[Callable[[], None]] = field(default_factory=list)
    """What happens once the workers run, in turn."""
    told: list[str] = field(default_factory=list)

    def victim(self) -> str:
        """A worker to which nothing happens yet."""
        return self.draw.choice(sorted(name for name in self.faults if name not in self.codes))

    def step(self) -> int:
        return self.draw.randint(2, STEPS // 2)

    def others(self, *names: str) -> list[Worker]:
        """Workers that go on while these do not."""
        lost = {name for name, codes in self.codes.items() if codes in (KILLED, LEFT)}
        return [each for name, each in self.workers.items() if name not in {*names, *lost} and name not in self.away]

    def reached(self, step: int) -> None:
        """Waits until this step is committed."""
        wait_until(lambda: committed_steps(self.workers.values()) >= step, f"step {step} is committed")

    # ---- mishaps

    def kill(self) -> None:
        name, point, step = self.victim(), self.draw.choice(POINTS), self.step()
        self.faults[name].append(Fault(point, step))
        self.codes[name] = KILLED
        self.told.append(f"{name} is killed at {point} of step {step}")

    def kill_two(self) -> None:
        step = self.step()
        for _ in range(2):
            name, point = self.victim(), self.draw.choice(POINTS)
            self.faults[name].append(Fault(point, step))
            self.codes[name] = KILLED
            self.told.append(f"{name} is killed at {point} of step {step}")

    def kill_in_recovery(self) -> None:
        self.kill()
        name, phase = self.victim(), self.draw.choice(PHASES)
        self.faults[name].append(Fault(f"phase {phase}", nth=2))
        self.codes[name] = KILLED
        self.told.append(f"{name} is killed in the recovery's phase {phase}")

    def stop(self) -> None:
        self._stop("and continues", self._wait_without)

    def stop_to_the_end(self) -> None:
        def end(name: str) -> None:
            for each in self.others(name):
                each.join()

        self._stop("until the job is over", end)

    def _stop(self, how_long: str, wait: Callable[[str], None]) -> None:
        name, point, step = self.victim(), self.draw.choice(POINTS), self.step()
        self.faults[name].append(Fault(point, step, "stop"))
        self.codes[name] = LATE
        self.away.add(name)
        self.told.append(f"{name} is stopped at {point} of step {step} {how_long}")

        def act() -> None:
            self.workers[name].wait_until_stopped()
            wait(name)
            self.workers[name].signal(signal.SIGCONT)

        self.acts.append(act)

    def hang(self) -> None:
        name, step = self.victim(), self.step()
        self.faults[name].append(Fault("forward", step, "hang"))
        self.codes[name] = (*LATE, *KILLED)
        self.away.add(name)
        self.told.append(f"{name} hangs in step {step}")

        def act() -> None:
            self.workers[name].wait_for("fault", limit=60)
            self._wait_without(name)
            self.job.wake()
            for each in self.others(name):
                each.join()
            self.workers[name].signal(signal.SIGKILL)  # it may sit out for longer than the job lasts

        self.acts.append(act)

    def leave(self) -> None:
        name, step = self.victim(), self.step()
        self.codes[name] = LEFT
        self.told.append(f"{name} gets SIGTERM at step {step}")

        def act() -> None:
            self.reached(step)
            self.workers[name].signal(signal.SIGTERM)

        self.acts.append(act)

    def join(self) -> None:
        step = self.step()
        self.told.append(f"one joins at step {step}")

        def act() -> None:
            self.reached(step)
            self.codes["z"] = LATE
            self.workers["z"] = self.job.start("z", steps=STEPS, slow=SLOW)

        self.acts.append(act)

    def restart_lighthouse(self) -> None:
        step = self.step()
        self.told.append(f"the Lighthouse restarts at step {step}")

        def act() -> None:
            self.reached(step)
            self.job.restart_lighthouse()

        self.acts.append(act)

    def _wait_without(self, name: str) -> None:
        """Until the others have gone on without a worker, or are done."""
        since = self.workers[name].events("fault")[0]["time"]
        others = self.others(name)
        wait_until(
            lambda: (
                any(e["time"] > since for each in others for e in each.events("recovered"))
                or any(not each.process.is_alive() for each in others)
            ),
            f"the others go on without {name}",
        )


SINGLE = (Run.kill, Run.stop, Run.stop_to_the_end, Run.hang, Run.leave)
FREE = (Run.join, Run.restart_lighthouse)
MISHAPS: list[tuple[Callable[[Run], None], ...]] = [
    *((one,) for one in SINGLE),
    *((one, two) for one in SINGLE for two in (Run.kill, *FREE)),
    (Run.kill_two,),
    (Run.kill_in_recovery,),
    *((Run.kill_two, free) for free in FREE),
]


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


def run(seed: int, folder: Path) -> str:
    """Runs the schedule of a seed and checks it; returns what happened.

    Raises:
        AssertionError: a rule is broken; the text begins with what was to happen.
    """
    draw = random.Random(seed)
    preset = PRESET_NAMES[seed % len(PRESET_NAMES)]
    names = "abcde"[: draw.choice([4, 4, 5])]
    options: dict[str, Any] = {"preset": preset, "copies": 3, "hang_limit": HANG_LIMIT, "rejoin_limit": 3.0}
    options |= {"checkpoint_dir": str(folder / "saved"), "checkpoint_every": draw.choice([0, 7])}
    if preset in ("baft", "lazarus"):
        options["min_replicas"] = 3
    job = Job(folder, len(names), **options)
    made = Run(job, draw, faults={name: [] for name in names})
    for mishap in draw.choice(MISHAPS):
        mishap(made)
    told = f"seed {seed}, {preset}, {len(names)} workers: {'; '.join(made.told)}"
    try:
        made.workers = {name: job.start(name, *made.faults[name], steps=STEPS, slow=SLOW) for name in names}
        for act in made.acts:
            act()
        _check(made, preset)
    except AssertionError as failed:
        raise AssertionError(f"{told}\n{failed}") from failed
    finally:
        job.close()
    return told


def _check(made: Run, preset: str) -> None:
    for name, each in made.workers.items():
        code, expected = each.join(), made.codes.get(name, PROPER)
        assert code in expected, f"{name} ended with {code}, expected one of {expected}\n{each.log()}"
    workers = list(made.workers.values())
    check_history(workers, away=made.away)
    assert committed_steps(workers) == STEPS
    if preset not in LOSES_TOKENS:
        expected = undisturbed()
        for event in (event for each in workers for event in each.events("commit")):
            assert math.isclose(event["loss"], expected[event["step"]], rel_tol=TOLERANCE), event


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    failures = 0
    for seed in range(options.first_seed, options.first_seed + options.runs):
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(f"{run(seed, Path(folder))}: right in {time.monotonic() - began:.0f} s", flush=True)
            except AssertionError as failed:
                failures += 1
                print(f"WRONG: {failed}", flush=True)
    print(f"{options.runs} runs, {failures} wrong")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
