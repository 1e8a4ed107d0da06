"""Mishaps of a random schedule: what is to happen to a job, and what `docs/` says of how each worker ends then.

Each draws what it needs from the schedule's seed. All are survivable by construction: three nodes hold each unit's
state, and two workers at most are out of the job at a time.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support import disks
from support.harness import Job, Worker, wait_until
from support.history import committed_steps
from support.hosts import Hosts
from support.worker import Fault

STEPS = 36
SLOW = 0.1
"""Seconds that each step takes at least, so that what is to happen during the run does."""
HANG_LIMIT = 4.0
CHECKPOINT_EVERY = 7
POINTS = ("forward", "reduce", "vote", "update", "copy", "commit")
PHASES = ("agree", "rebuild", "fetch", "verify")
KILLED, LEFT = (-signal.SIGKILL,), (143,)
LATE = (0, 1)
"""A worker that comes back finds its job, or that it is over."""


@dataclass
class Schedule:
    """A plan of what happens to a job, and what is expected of it."""

    draw: random.Random
    names: str
    preset: str
    options: dict[str, Any]
    """Of each session."""
    drawn: tuple[Callable[[Schedule], None], ...]
    """The mishaps, each of which adds its part to the fields below."""
    faults: dict[str, list[Fault]] = field(init=False)
    codes: dict[str, Collection[int]] = field(default_factory=dict)
    """Exit codes of workers that do not simply finish."""
    errors: dict[str, Collection[str]] = field(default_factory=dict)
    """Errors that a worker that ends with 1 may have raised, other than `LeftBehind`."""
    away: set[str] = field(default_factory=set)
    """Workers that may be out of the job for a while, and come back."""
    stays_full: bool = False
    """Whether the disk is full at the end of the job."""
    needs: set[str] = field(default_factory=set)
    """Of `hosts` and `disk`: what this process needs rights for."""
    acts: list[Callable[[], None]] = field(default_factory=list)
    """Actions once the workers run, in turn."""
    told: list[str] = field(default_factory=list)

    job: Job = field(init=False)
    hosts: Hosts | None = None
    """On which the workers run, if the network will be cut."""
    saved: Path = field(init=False)
    workers: dict[str, Worker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.faults = {name: [] for name in self.names}
        for mishap in self.drawn:
            mishap(self)

    def start(self, name: str, *faults: Fault) -> Worker:
        """A worker, on its host if there are such."""
        network = {"network": self.hosts.network(name)} if self.hosts else {}
        return self.job.start(name, *faults, steps=STEPS, slow=SLOW, **network)

    def victim(self) -> str:
        """A worker to which nothing happens yet."""
        return self.draw.choice(sorted(name for name in self.faults if name not in self.codes))

    def step(self) -> int:
        return self.draw.randint(2, STEPS // 2)

    def others(self, *names: str) -> list[Worker]:
        """Return the workers that continue while these do not."""
        lost = {name for name, codes in self.codes.items() if codes in (KILLED, LEFT)}
        return [each for name, each in self.workers.items() if name not in {*names, *lost} and name not in self.away]

    def reached(self, step: int) -> None:
        """Waits until this step is committed."""
        wait_until(lambda: committed_steps(self.workers.values()) >= step, f"step {step} is committed")

    # ---- workers that die

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

    def leave(self) -> None:
        name, step = self.victim(), self.step()
        self.codes[name] = LEFT
        self.told.append(f"{name} gets SIGTERM at step {step}")

        def act() -> None:
            self.reached(step)
            self.workers[name].signal(signal.SIGTERM)

        self.acts.append(act)

    # ---- workers that are silent for a while

    def stop(self) -> None:
        self._stop("and continues", self._wait_without)

    def stop_to_the_end(self) -> None:
        self._stop("until the job is over", self._wait_for_the_end)

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
            self._wait_for_the_end(name)
            self.workers[name].signal(signal.SIGKILL)  # it may sit out for longer than the job lasts

        self.acts.append(act)

    def slow(self) -> None:
        """One member is slow in some steps, by less than `hang_timeout`: all wait for it, and nobody is left out."""
        name, point, step = self.victim(), self.draw.choice(POINTS), self.step()
        steps, seconds = self.draw.randint(2, 4), round(self.draw.uniform(0.25, 0.6) * HANG_LIMIT, 1)
        self.faults[name] += [Fault(point, each, "slow", seconds=seconds) for each in range(step, step + steps)]
        self.told.append(f"{name} takes {seconds} s longer at {point} of {steps} steps from {step} on")

    # ---- the network

    def cut_pair(self) -> None:
        self._cut_pair(self._wait_until_apart, "until others continue")

    def cut_pair_to_the_end(self) -> None:
        self._cut_pair(self._wait_for_the_end, "until the job is over")

    def _cut_pair(self, wait: Callable[..., None], how_long: str) -> None:
        """All reach the Lighthouse. One of the two withdraws: that with the higher id, if nothing else happens."""
        one, other = self.draw.sample(sorted(name for name in self.faults if name not in self.codes), 2)
        is_one_way = self.draw.random() < 0.5
        cables = [(one, other)] if is_one_way else [(one, other), (other, one)]
        lost = [max(one, other)] if len(self.drawn) == 1 else [one, other]
        what = f"nothing comes from {one} to {other}" if is_one_way else f"{one} and {other} are cut from each other"
        self._cut(lost, (one, other), lambda hosts: hosts.cut(*cables), wait, f"{what} %s {how_long}")

    def silence(self) -> None:
        self._silence(self._wait_until_apart, "until others continue")

    def silence_to_the_end(self) -> None:
        self._silence(self._wait_for_the_end, "until the job is over")

    def _silence(self, wait: Callable[..., None], how_long: str) -> None:
        """A host is cut from all, the Lighthouse included; its worker waits for that, for `quorum_timeout` at most."""
        name = self.victim()
        self.errors[name] = ("LeftBehind", "JoinTimeout")
        self._cut([name], (name,), lambda hosts: hosts.silence(name), wait, f"{name} is cut from all %s {how_long}")

    def isolate(self) -> None:
        """A host is cut from the other workers, and reaches the Lighthouse: it is the smaller part, and withdraws."""
        name = self.victim()
        rest = self.names.replace(name, "")
        what = f"{name} is cut from the other workers %s until others continue"
        self._cut([name], (name,), lambda hosts: hosts.split(name, rest), self._wait_until_apart, what)

    def _cut(
        self,
        lost: list[str],
        ends: tuple[str, ...],
        cut: Callable[[Hosts], None],
        wait: Callable[..., None],
        what: str,
    ) -> None:
        """`lost`: those of the two `ends` that may be out of the job until the network is restored."""
        step = self.step()
        self.needs.add("hosts")
        self.codes |= dict.fromkeys(lost, LATE)
        self.away |= {*lost}
        self.told.append(what % f"at step {step}")

        def act() -> None:
            assert self.hosts is not None
            self.reached(step)
            cut(self.hosts)
            wait(*ends)
            self.hosts.heal()

        self.acts.append(act)

    # ---- what happens to no worker

    def join(self) -> None:
        step = self.step()
        self.told.append(f"one joins at step {step}")

        def act() -> None:
            self.reached(step)
            self.codes["z"], self.errors["z"] = LATE, ("JoinTimeout",)
            self.workers["z"] = self.start("z")

        self.acts.append(act)

    def restart_lighthouse(self) -> None:
        step = self.step()
        self.told.append(f"the Lighthouse restarts at step {step}")

        def act() -> None:
            self.reached(step)
            self.job.restart_lighthouse()

        self.acts.append(act)

    def lose_lighthouse(self) -> None:
        """Only members that must agree again wait for it; it comes back without any memory."""
        step, seconds = self.step(), round(self.draw.uniform(1.0, 4.0), 1)
        self.told.append(f"the Lighthouse is away for {seconds} s from step {step} on")

        def act() -> None:
            self.reached(step)
            self.job.stop_lighthouse()
            time.sleep(seconds)  # the loss itself
            self.job.restart_lighthouse()

        self.acts.append(act)

    def fill_disk(self) -> None:
        """A checkpoint or two fail, and training continues; the disk is free again before the last one."""
        step, steps = self.step(), self.draw.randint(CHECKPOINT_EVERY, CHECKPOINT_EVERY + 3)
        self._fill_disk(step, f"until step {step + steps}")

        def act() -> None:
            self.reached(step + steps)
            disks.free(self.saved)

        self.acts.append(act)

    def fill_disk_to_the_end(self) -> None:
        """All steps are taken all the same; then the last checkpoint fails, which ends the job with its memory kept."""
        self.stays_full = True
        self._fill_disk(self.step(), "for good")

    def _fill_disk(self, step: int, how_long: str) -> None:
        self.needs.add("disk")
        self.options["checkpoint_interval"] = CHECKPOINT_EVERY
        self.told.append(f"the disk is full from step {step} on {how_long}")

        def act() -> None:
            self.reached(step)
            disks.fill(self.saved)

        self.acts.append(act)

    # ---- what is waited for

    def _wait_without(self, name: str) -> None:
        """Until the others have gone on without a worker, or are done."""
        since = self.workers[name].events("fault")[0]["time"]
        others = self.others(name)
        wait_until(
            lambda: (
                any(e["time"] > since for each in others for e in each.events("recovered"))
                or any(not each.process.is_alive() for each in others)
            ),
            f"the others continue without {name}",
        )

    def _wait_until_apart(self, *names: str) -> None:
        """Until one of these is two steps behind, which a member never is, or the job is over."""
        behind, others = [self.workers[name] for name in names], self.others(*names)
        wait_until(
            lambda: (
                committed_steps(self.workers.values()) - min(committed_steps([each]) for each in behind) >= 2
                or any(not each.process.is_alive() for each in others)
            ),
            f"the others continue without one of {names}",
        )

    def _wait_for_the_end(self, *names: str) -> None:
        """Until all others are done, and all but one of these."""
        for each in self.others(*names):
            each.join()
        some = [self.workers[name].process for name in names]
        wait_until(lambda: sum(each.is_alive() for each in some) <= 1, f"one of {names} is done")


Mishap = Callable[[Schedule], None]

PASSING: tuple[Mishap, ...] = (
    Schedule.kill,
    Schedule.stop,
    Schedule.leave,
    Schedule.cut_pair,
    Schedule.silence,
)
LASTING: tuple[Mishap, ...] = (
    Schedule.stop_to_the_end,
    Schedule.hang,
    Schedule.cut_pair_to_the_end,
    Schedule.silence_to_the_end,
)
"""Of these the act takes until the others are done, so it is the last one."""
FREE: tuple[Mishap, ...] = (
    Schedule.join,
    Schedule.restart_lighthouse,
    Schedule.lose_lighthouse,
    Schedule.slow,
    Schedule.fill_disk,
)
"""With these no worker is out of the job, so they may come with any two that are."""
ALONE: tuple[Mishap, ...] = (
    Schedule.isolate,
    Schedule.lose_lighthouse,
    Schedule.slow,
    Schedule.fill_disk,
    Schedule.fill_disk_to_the_end,
)
SINGLE: list[tuple[Mishap, ...]] = [(one,) for one in (*PASSING, *LASTING, *ALONE)]
SEVERAL: list[tuple[Mishap, ...]] = [
    *((one, two) for one in PASSING for two in (Schedule.kill, *FREE)),
    *((two, one) for one in LASTING for two in (Schedule.kill, *FREE)),
    *((two,) for two in (Schedule.kill_two, Schedule.kill_in_recovery)),
    *((Schedule.kill_two, free) for free in FREE),
    (Schedule.kill, Schedule.fill_disk_to_the_end),
]
MISHAPS = (SINGLE, SEVERAL, SEVERAL)
"""A seed draws one of these, then an entry of it. A change here changes what seeds draw; each run prints its own."""
