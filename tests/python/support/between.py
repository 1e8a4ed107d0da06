"""A training run whose script works between two steps with all members, as one real process. See `worker.py`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import evermoe
from evermoe.errors import PeerLost
from evermoe.session import evaluations
from evermoe.session.purposes import Meeting, Purpose
from support import worker
from support.flat_options import grouped
from support.harness import Worker
from support.optimizers import make_optimizer
from support.worker import Options, Recorder

BATCHES = [worker.dataset()[start : start + 7] for start in (0, 7, 14, 21, 28)]
"""Five, so that members of two or three have different numbers of them; and one is smaller."""
BATCHES[-1] = BATCHES[-1][:2]
LONG_SECONDS = 6.0
SHORT_SECONDS = 0.7


def sums(session: evermoe.Session, batch: torch.Tensor) -> dict[str, Any]:
    return {"loss": logits_loss(session.model, batch, "sum"), "tokens": batch[:, 1:].numel()}


def logits_loss(model: Any, tokens: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    x = model.embedding(tokens[:, :-1])
    x = x + model.first(x)
    x = x + model.second(x)
    return F.cross_entropy(model.head(x).flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)


class Script:
    """Actions after each step, by the name of the scenario."""

    def __init__(self, options: Options, session: evermoe.Session, record: Recorder) -> None:
        self.options, self.session, self.record = options, session, record

    def evaluate(self) -> None:
        """Two evaluations, of which the first is repeated where a loss interrupts it."""

        def fn(batch: torch.Tensor) -> dict[str, Any]:
            self.record.fault("forward", self.session.step)
            self.record.write("batch", step=self.session.step, rows=len(batch))
            return sums(self.session, batch)

        found = self.session.evaluate(BATCHES, fn)
        self.record.fault("evaluated", self.session.step)
        again = self.session.evaluate(BATCHES[:1], lambda batch: sums(self.session, batch))
        self.record.write(
            "evaluated", step=self.session.step, found=found, again=again, mode=self.session.model.training
        )

    def cut(self) -> None:
        """As `evaluate`; one member loses the others in its last exchange, when they have finished."""
        gather = evaluations.gather_json
        if self.session.step == 3 and self.options.name == "b":

            def gather_and_lose(group: Any, value: Any) -> Any:
                evaluations.gather_json = gather
                gather(group, value)
                group.drop("cut off")
                raise PeerLost("cut off")

            evaluations.gather_json = gather_and_lose
        self.evaluate()

    def generate(self) -> None:
        """Greedy generation of different lengths, and none at all on one member; all leave the loop at step 4."""
        rank, size = self.session.group.rank, self.session.group.size
        with self.session.evaluation():
            for _ in range(3 * rank):
                logits_loss(self.session.model, BATCHES[0][: rank + 1])
            if rank == size - 1:
                self.session.model.second(torch.zeros(2, worker.WIDTH))  # one layer alone
        self.record.write("generated", step=self.session.step, broken=self.session.group.broken)

    def skip(self) -> None:
        self.record.fault("skip", self.session.step)
        if self.options.name != "b" or self.session.step != 2:
            with self.session.evaluation():
                logits_loss(self.session.model, BATCHES[0])

    def skip_first(self) -> None:
        """As `skip`; the member that skips waits for longer than the others."""
        if self.options.name != "b" and self.session.step == 2:
            time.sleep(SHORT_SECONDS)
        self.skip()

    def alone(self) -> None:
        if self.session.step != 2:
            return
        with self.session.alone() as is_mine:
            assert is_mine == self.session.is_main
            if is_mine:
                self.record.fault("alone", 2)
                time.sleep(LONG_SECONDS)

    def save(self) -> None:
        """The complete model, in memory and in a folder, inside work that is repeated."""
        if self.session.step != 3:
            return

        def work() -> int:
            self.record.fault("forward", 3)
            state = self.session.full_state_dict()
            self.session.full_state_dict(Path(self.options.folder) / "complete")
            return len(state)

        self.record.write("saved", tensors=self.session.repeated(work))

    def checkpoint(self) -> None:
        if self.session.step in (3, 4):
            self.record.fault("saving", self.session.step)
            found = self.session.save(Path(self.options.folder) / "kept")
            self.record.write("saved", step=self.session.step, path=found)

    def twice(self, found: list[str]) -> None:
        """An evaluation before each attempt at step 2."""
        count = "first" if self.options.name in "abc" and not found else "second"

        def work() -> str:
            if count == "second":
                self.record.fault("second", 2)
            return f"{count} of {self.options.name}"

        found.append(self.session.repeated(work))
        self.record.write("twice", found=found)

    def stop_before(self) -> None:
        """All members ask to stop, and leave the step out that is drawn; one may die where they meet."""
        meet = Meeting.meet

        def meet_or_die(meeting: Meeting, mine: Purpose, *more: Any) -> Purpose:
            if mine is Purpose.STOP:
                self.record.fault("stop", 3)
            return meet(meeting, mine, *more)

        Meeting.meet = meet_or_die  # type: ignore[method-assign]
        self.session.stop()

    def stop_all(self) -> None:
        if self.session.step == 4:
            self.session.stop()

    def overdue(self) -> None:
        """By the clock of one member, an hour passes."""
        if self.session.step == 3 and self.options.name == "b":
            self.session._driver.saving.checkpointer._began -= 3600

    def stop_one(self) -> None:
        if self.session.step == 4 and self.options.name == "b":
            self.session.stop()


AFTER_STEP = {
    "evaluate": Script.evaluate,
    "cut": Script.cut,
    "generate": Script.generate,
    "skip": Script.skip,
    "skip_first": Script.skip_first,
    "alone": Script.alone,
    "save": Script.save,
    "checkpoint": Script.checkpoint,
    "overdue": Script.overdue,
    "stop_all": Script.stop_all,
    "stop_one": Script.stop_one,
}
"""Actions after a committed step, by scenario; nothing in the others."""


def train(options: Options) -> None:
    torch.set_num_threads(1)
    record = Recorder(options)
    record.write("started", parent=os.getppid())
    model, data = worker.make_model(""), worker.dataset()
    optimizer = make_optimizer(options.optimizer, model)
    sampler = evermoe.ElasticSampler(worker.SAMPLES, options.batch_size)
    session = evermoe.Session(
        model,
        optimizer,
        sampler,
        on_event=record,
        **grouped(options.session, lighthouse=options.lighthouse),
    )
    record.session = session
    script, name = Script(options, session, record), options.environment["SCENARIO"]
    steps, found = session.steps(options.steps), list[str]()
    for step in steps:
        record.wait_at_gate(step.number)
        if name == "before" and session.step == 2:
            script.evaluate()
        if name == "twice" and session.step == 2:
            script.twice(found)
        if name == "stop_before" and session.step == 3:
            script.stop_before()
            continue
        with step:
            record.fault("inside", step.number)
            step.backward(logits_loss(model, data[step.indices]))
            if name == "stop_inside" and step.number == 3 and options.name == "b":
                session.stop()
        if step.committed:
            record.write("used", step=step.number, indices=step.indices.tolist(), weight=step.weight)
        if name == "generate" and session.step == 4:
            break
        if step.committed and name in AFTER_STEP:
            AFTER_STEP[name](script)
    record.write("done", step=session.step, loss=session.loss)


def main(options: Options) -> None:
    log = os.open(Path(options.folder) / f"{options.name}.{os.getpid()}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        train(options)
    except BaseException as error:
        Recorder(options).write("failed", error=type(error).__name__, message=str(error))
        raise


class BetweenWorker(Worker):
    """Runs this script."""

    main = staticmethod(main)


def scenario(name: str) -> dict[str, Any]:
    """Options of `Job.start` for a scenario."""
    return {"kind": BetweenWorker, "environment": {"SCENARIO": name}}
