"""Snapshots of the demo travel in idle windows, through a death and a join: real processes."""

from __future__ import annotations

import json

import pytest

from evermoe.process.reports import EventFile
from support.commands import evermoe_process

PLANNED = 3
"""The first version that is sent when windows are known: the first step is no measure, and the second is recorded."""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("preset", ["gemini", "baft"])
def test_windows_are_known_from_the_third_step_to_the_end(tmp_path, preset):
    """The machine decides how many messages fit into windows, not where the plan looks for them."""
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    what = ["--preset", preset, "--steps", "36", "--kill", "2@9", "--join", "14", "--no-baseline"]
    where = ["--events", "events", "--memory-dir", str(memory), "--json", "out.json"]
    done = evermoe_process("demo", *what, *where, folder=tmp_path, limit=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    by_worker = {}
    for path in (tmp_path / "events" / "run").glob("events-*.jsonl"):
        by_worker[path.stem] = [event for event in EventFile(path).read() if event["event"] == "chunk_sent"]
    assert len(by_worker) == 5
    for name, sent in by_worker.items():
        later = {chunk["when"] for chunk in sent if chunk["step"] >= PLANNED}
        assert later <= {"window", "vote", "recovery"}, name
        assert "window" in later, name
    result = json.loads((tmp_path / "out.json").read_text())
    assert sum(result["messages"].values()) == sum(map(len, by_worker.values()))
    assert f"{result['messages']['window']} messages in idle windows" in " ".join(done.stdout.split())


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("preset", ["gemini", "baft"])
def test_nine_of_ten_messages_are_sent_in_windows(tmp_path, preset):
    """With the demo's defaults, a kill and a join; all but the first copies, and the version after the last step."""
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    run = ["--preset", preset, "--no-baseline", "--memory-dir", str(memory), "--json", "out.json"]
    done = evermoe_process("demo", *run, folder=tmp_path, limit=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["episodes"], "a worker was killed"
    sent = result["messages"]
    assert sent["window"] > 0.9 * (sum(sent.values()) - sent["recovery"]), sent
