"""Habits of people who train: each equals plain training in one process, through a death, or is refused by name."""

import json

import pytest

from support.habits import DIES_IN, HABITS, STEPS, elastic, plain, run
from support.harness import PATIENCE, SERVER


@pytest.fixture
def start(start_job, tmp_path):
    """`start(script, names, *arguments)` runs `script(write, *arguments, node, options)`; what each has written."""
    processes = []

    def begin(script, names, *arguments, **session):
        job = start_job(len(names), **session)
        options = job.session | {"lighthouse": job.address}
        for name in names:
            process = SERVER.Process(target=run, args=(script, str(tmp_path), name, *arguments, name, options))
            process.start()
            processes.append(process)
        for process in processes:
            process.join(PATIENCE)
        found = {}
        for name in names:
            lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
            found[name] = [json.loads(line) for line in lines]
        return found, {name: (tmp_path / f"{name}.log").read_text() for name in names}

    yield begin
    for process in processes:
        process.kill()
        process.join()


@pytest.mark.parametrize("habit", HABITS)
def test_equals_plain_training_through_a_death(start, habit):
    expected = plain(habit)
    found, logs = start(elastic, "abc", habit)
    for name in "ac":
        steps = [event for event in found[name] if event["event"] == "commit"]
        assert [event["step"] for event in steps] == list(range(STEPS)), logs[name][-3000:]
        for event, values in zip(steps, expected, strict=True):
            for key, value in values.items():
                assert event[key] == pytest.approx(value, abs=HABITS[habit].tolerance, rel=1e-6), (event, values)
        recovered = [event for event in found[name] if event["event"] == "recovered"][-1]
        assert (recovered["step"], recovered["members"], recovered["steps_lost"]) == (DIES_IN, 2, 0)
        assert recovered["digests_mismatched"] == 0
        verified = [event for event in found[name] if event["event"] == "verified"]
        assert [event["digests_mismatched"] for event in verified] == [0]
    if "scale" in expected[0]:
        assert len({values["scale"] for values in expected}) == 2
