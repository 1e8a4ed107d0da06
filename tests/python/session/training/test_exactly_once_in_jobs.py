"""Every sampler in real jobs: members are killed, leave, join, are all killed and start again in another number."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch

import evermoe
from evermoe.data import loader, reader, reader_states
from evermoe.process.reports import EventFile
from support.exactly_once import run as run_alone
from support.flat_options import grouped
from support.habits import Model, adamw, mean_loss, run
from support.harness import PATIENCE, SERVER, wait_until
from test_exactly_once import DATA

FIRST, JOINING, LAST = "abcd", "efg", "hi"
KILLED, LEAVES, JOINS = 5, 9, 12
"""Steps in which a member is killed and another one leaves, and after which others join."""
MORE = 12
"""Steps that five members take together, and later two."""


def member(write, kind, node, options):
    """Trains on one kind of data, and writes its samples of each committed step."""
    reader_states.EXCHANGE_PERIOD = reader.STATE_PERIOD = loader.STATE_PERIOD = 2
    torch.manual_seed(0)
    model = Model()
    data = DATA[kind].make()
    session = evermoe.Session(model, adamw(model), data, **grouped(options, node=node))
    steps = session.steps(1000)
    together = began = None
    for step in steps:
        began = step.number if began is None else began
        if session.group.size == len(FIRST + JOINING) - 2 and together is None:
            together = step.number
        ends = together is not None and step.number == together + MORE
        with step as batch:
            if ends or (node == "d" and step.number == KILLED):
                os.kill(os.getpid(), signal.SIGKILL)
            samples = batch.tolist() if isinstance(batch, torch.Tensor) else batch
            tokens = torch.tensor([[len(repr(each)) % 16] * 5 for each in samples])
            step.backward(mean_loss(model, tokens))
        if step.committed:
            share = step.share
            numbers = range(len(samples)) if share.samples is None else share.indices.tolist()
            rank = session.group.rank if share.samples is None else 0
            found = [[rank, number, each] for number, each in zip(numbers, samples, strict=True)]
            write("commit", step=step.number, attempt=step.generation, samples=found if share.weight else [])
            if node == "c" and step.number == LEAVES:
                session.leave()
            if node in LAST and step.number == began + MORE:
                session.stop()
        time.sleep(0.02)


def committed(folder, names):
    """The samples of each committed step, by its number and attempt, in the order of the global batch.

    Where the last copies of a unit are lost, the survivors take steps again.
    """
    found = defaultdict(list)
    for name in names:
        for event in EventFile(Path(folder) / f"{name}.jsonl").read():
            if event["event"] == "commit":
                found[event["step"], event["attempt"]] += event["samples"]
    ordered = {place: sorted(samples, key=lambda each: each[:2]) for place, samples in found.items()}
    return {place: [sample for *_, sample in samples] for place, samples in ordered.items()}


@pytest.mark.parametrize("kind", ["readers, packed", *(kind for kind in DATA if kind != "readers, packed")])
def test_each_step_has_its_samples_through_all_changes(start_job, tmp_path, kind):
    """4 members, 3 after a kill, 2 when one leaves, 5 with three that join, none, and 2 from what is left."""
    job = start_job(len(FIRST), join_interval=1, checkpoints=str(tmp_path / "checkpoints"), checkpoint_interval=4)
    processes = {}

    def begin(names, **options):
        given = job.session | {"lighthouse": job.address} | options
        for name in names:
            arguments = (member, str(tmp_path), name, kind, name, given)
            processes[name] = SERVER.Process(target=run, args=arguments)
            processes[name].start()

    def logs(names):
        return {name: (tmp_path / f"{name}.log").read_text()[-2000:] for name in names}

    try:
        begin(FIRST)
        wait_until(lambda: max(committed(tmp_path, "a"), default=(0,)) >= (JOINS,), "members leave", PATIENCE)
        begin(JOINING)
        for name in FIRST + JOINING:
            processes[name].join(PATIENCE)
        codes = {name: processes[name].exitcode for name in FIRST + JOINING}
        assert codes == dict.fromkeys("abdefg", -signal.SIGKILL) | {"c": 0}, logs(FIRST + JOINING)
        begin(LAST, members=len(LAST))
        for name in LAST:
            processes[name].join(PATIENCE)
        assert [processes[name].exitcode for name in LAST] == [0, 0], logs(LAST)
    finally:
        for process in processes.values():
            process.kill()
            process.join()
    before, after = committed(tmp_path, FIRST + JOINING), committed(tmp_path, LAST)
    steps = {step for step, _ in (*before, *after)}
    assert steps == set(range(max(steps) + 1)), "no step is left out"
    assert max(before) >= (JOINS + MORE,) and min(after) > (KILLED,)
    expected = json.loads(json.dumps(run_alone(DATA[kind], max(steps) + 1).committed))
    for (step, attempt), samples in (*before.items(), *after.items()):
        assert samples == expected[step], f"step {step}, attempt {attempt}"
