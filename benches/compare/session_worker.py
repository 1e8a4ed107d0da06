"""Worker of evermoe's presets."""

from __future__ import annotations

import os

from benches.compare.program import MAX_GRAD_NORM, Program, main
from evermoe.demo.train import Reporter
from evermoe.demo.worker_flags import session_arguments
from evermoe.session.session import Session


def work(program: Program, reporter: Reporter) -> None:
    """Train in an `evermoe.Session`."""
    options = program.options
    session = Session(
        program.model,
        program.optimizer,
        program.sampler,
        on_event=reporter,
        max_grad_norm=MAX_GRAD_NORM,
        **session_arguments(options, join_interval=1),
    )
    reporter.session = session
    reporter.write("ready", {"pid": os.getpid()})
    for step in session.steps(options.steps):
        with step as indices:
            loss = program.model.loss(program.corpus[indices])
            reporter.strike(step.number, "step")
            step.backward(loss)
        if not step.committed:
            continue
        reporter.write("taken", {"step": step.number, "loss": session.loss, "members": session.group.size})
        if session.step == options.steps:
            with session.evaluation():
                reporter.write("final", {"loss": program.held_out_loss()})


if __name__ == "__main__":
    main(__doc__, work)
