"""The complete model, as a worker gathers it between two steps."""

from __future__ import annotations

from pathlib import Path

import torch

import evermoe
from evermoe.state.unit import weight_tensors
from support.worker import Options, Recorder


def write_complete(options: Options, session: evermoe.Session, record: Recorder) -> None:
    """Write the complete model: what it gets as a file, the model's folder, and that of transformers."""
    place = Path(options.folder) / options.full[session.step]
    before, session.group.on_begin = session.group.on_begin, lambda name, _: record.fault(f"full {name}", session.step)
    with session.evaluation():
        if not options.island:
            torch.save(weight_tensors(session.model), place.with_suffix(f".{session.group.rank}.held"))
        state = session.full_state_dict()
        torch.save(state, place.with_suffix(f".{session.group.rank}.pt"))
        session.full_state_dict(place)
        if options.island:
            session.save(place.with_suffix(".saved"))
        if options.model or options.hub:
            from evermoe.integrations.transformers import export  # takes seconds to import

            export(session, session.model.model, place.with_suffix(".hub"))  # type: ignore[arg-type]
        record.write("full", step=session.step)
    session.group.on_begin = before
