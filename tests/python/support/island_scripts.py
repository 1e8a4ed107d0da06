"""Scripts of islands with habits of their own: evaluations between steps, and forwards before the loop."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

import evermoe
from evermoe.errors import PeerLost
from evermoe.session import protocol
from support import islands, worker
from support.flat_options import grouped
from support.harness import Worker
from support.worker import Options, Recorder

UNHEARD = 4
"""The step whose vote one process does not hear the result of."""
BATCHES = worker.dataset().split(25)


def train(options: Options, habit: str) -> None:
    """Train a `worker.Model`; `habit` is "unheard" (one process hears no result of a vote, and scripts evaluate after
    committed steps), "early" (a forward without gradients before the loop) or "evaluates"."""
    torch.set_num_threads(1)
    record, model, data = Recorder(options), worker.Model(), worker.dataset()
    mesh = islands.divide(model, options.island, record) if options.island else None
    record.session = session = evermoe.Session(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        evermoe.ElasticSampler(worker.SAMPLES, options.batch_size),
        on_event=record,
        mesh=mesh,
        **grouped(options.session, lighthouse=options.lighthouse),
    )
    if habit == "unheard" and options.name == "a1":
        lose_a_result(session)
    if habit == "early":
        with torch.no_grad():
            model(BATCHES[0])
    for step in session.steps(options.steps):
        record.wait_at_gate(step.number)
        with step as indices:
            step.backward(model(data[indices]))
        if habit in ("unheard", "evaluates") and step.committed and step.number == UNHEARD:
            found = session.evaluate(BATCHES, lambda batch: {"loss": model(batch) * len(batch), "count": len(batch)})
            record.write("evaluated", loss=found["loss"] / found["count"])
    record.write("done", step=session.step)


def lose_a_result(session: evermoe.Session) -> None:
    """Let this process be cut off once it has voted, before it hears the result."""
    cast, has_lost = protocol.cast, list[bool]()

    def cut_off(*arguments: Any) -> Any:
        found = cast(*arguments)
        if session.step == UNHEARD and not has_lost:
            has_lost.append(True)
            raise PeerLost("cut off after its vote")
        return found

    protocol.cast = cut_off


def main(options: Options) -> None:
    """Run as a child of the tests' fork server; the variable HABIT names the habit."""
    log = os.open(Path(options.folder) / f"{options.name}.{os.getpid()}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    train(options, options.environment["HABIT"])


class ScriptWorker(Worker):
    main = staticmethod(main)


def script(habit: str) -> dict[str, Any]:
    """Options of `start` for a script with a habit."""
    return {"kind": ScriptWorker, "environment": {"HABIT": habit}}
