"""Replica nodes that are promoted to train, and workers that are demoted to keep copies, as an operator asks for it."""

from __future__ import annotations

import os
import signal

import pytest

from cli.test_run import start
from evermoe.cli.main import main
from evermoe.process.memory_folder import job_folder
from evermoe.process.reports import EventFile
from support.harness import wait_until

__all__ = ["start"]

SCRIPT = """
import os, sys, time, torch, evermoe
from evermoe.observe import JsonLines

torch.manual_seed(0)
layer = evermoe.MoE(8, 16, 6, top_k=1)
optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
data = torch.randn(100, 3, 8)
session = evermoe.Session(
    layer, optimizer, evermoe.ElasticSampler(100, 12), on_event=JsonLines("events.jsonl"),
    membership=evermoe.Membership(join_interval=1), placement=evermoe.Placement(expert_slots=1)
)
for step in session.steps(10**6):
    with step:
        step.backward(layer(data[step.indices]).square().mean())
    time.sleep(0.01)
"""


class Events:
    """Return what the processes of a job have written."""

    def __init__(self, path):
        self.path = path

    def __call__(self, kind, **fields):
        return [
            e
            for e in EventFile(self.path).read()
            if e["event"] == kind and all(e.get(key) == each for key, each in fields.items())
        ]

    def wait_for(self, kind, count=1, **fields):
        return wait_until(lambda: self(kind, **fields)[count - 1 :], f"{kind} {fields}", 60.0)[0]

    def pids(self, role):
        """Processes that have this role now."""
        roles = {event["pid"]: event["role"] for event in self("joined")}
        return [pid for pid, each in roles.items() if each == role]


def take_role(role, pid, folder):
    """`evermoe role`; its exit code."""
    return main(["role", role, str(pid), "--job", "turn", "--memory-dir", str(folder / "memory")])


@pytest.mark.timeout(240)
@pytest.mark.long
def test_a_replica_node_is_promoted_and_a_worker_demoted_in_their_processes(start, tmp_path):
    (tmp_path / "turn.py").write_text(SCRIPT)
    events = Events(tmp_path / "events.jsonl")
    command = start("--workers", "2", "--replicas", "1", "--on-lost", f"touch {tmp_path}/asked", "turn.py")
    (replica,) = wait_until(lambda: events.pids("replica"), "a replica node", 60.0)
    events.wait_for("commit", pid=replica)
    worker = events.pids("train")[0]

    assert take_role("train", replica, tmp_path) == 0
    joined = events.wait_for("joined", pid=replica, role="train")
    came = events.wait_for("recovered", pid=replica, members=3)
    assert sum(came["sources"].values()) > 0, "its units come from the others, or from its host's memory"
    events.wait_for("commit", pid=replica, members=3)
    assert joined["nodes"] == joined["nodes"][:1] * 3

    assert take_role("replica", worker, tmp_path) == 0
    events.wait_for("joined", pid=worker, role="replica")
    events.wait_for("commit", pid=worker, members=2)
    assert sorted(events.pids("train")) != sorted([worker, replica])
    assert events.pids("replica") == [worker]
    assert events("member_lost") == []
    assert not (tmp_path / "asked").exists(), "nobody asks for a machine in the place of one that comes back"

    os.kill(command.process.pid, signal.SIGTERM)
    code, said = command.end()
    assert code == 128 + signal.SIGTERM, said
    assert said.count("comes back with role") == 2
    assert {(event["steps_lost"], event["digests_mismatched"]) for event in events("recovered")} == {(0, 0)}


@pytest.mark.timeout(120)
@pytest.mark.long
def test_the_only_worker_is_not_demoted(start, tmp_path, capsys):
    (tmp_path / "turn.py").write_text(SCRIPT.replace("placement=evermoe.Placement(expert_slots=1)", "replication=1"))
    events = Events(tmp_path / "events.jsonl")
    command = start("--workers", "1", "turn.py")
    event = events.wait_for("commit", count=3)
    assert take_role("replica", event["pid"], tmp_path) == 2
    assert f"process {event['pid']} keeps its role: no other member trains" in capsys.readouterr().err
    command.wait_for("this process keeps its role: no other member trains")
    assert take_role("train", event["pid"], tmp_path) == 2
    assert "it has the role 'train' already" in capsys.readouterr().err
    events.wait_for("commit", step=event["step"] + 3)
    os.kill(command.process.pid, signal.SIGTERM)
    assert command.end()[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("pid", "job", "limit", "why"),
    [
        (None, "other", "9", "no process of job 'other' runs on this machine: expected the folder"),
        (2**22 + 1, "turn", "9", "there is no process 4194305 on this machine"),
        (None, "turn", "0.1", "has not answered within 0.1 s"),
        (None, "turn", "0", "expected --limit to be a number, > 0"),
    ],
)
def test_a_process_that_cannot_take_a_role_is_named(tmp_path, capsys, pid, job, limit, why):
    folder = job_folder(tmp_path, "turn")
    folder.mkdir()
    said = ["role", "train", str(pid or os.getpid()), "--job", job, "--memory-dir", str(tmp_path), "--limit", limit]
    assert main(said) == 2
    assert why in capsys.readouterr().err
    assert list(folder.iterdir()) == []
