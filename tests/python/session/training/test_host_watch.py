"""Warnings before memory or the disk of the checkpoints is full."""

from __future__ import annotations

import pytest

from evermoe import Checkpoints, ElasticSampler, Session
from evermoe.events import SickNode
from evermoe.session import host_watch, node_health
from evermoe.session.host_watch import Memory, find_host_problems, find_memory
from evermoe.session.node_health import NodeHealth
from support.harness import wait_until
from support.optimizers import make_optimizer
from support.worker import SAMPLES, Model, dataset

GIB = 1 << 30
MEMINFO = f"MemTotal: {512 << 20} kB\nMemFree: 1 kB\nMemAvailable: {300 << 20} kB\nHugePages_Total: 0\n"


@pytest.fixture
def host(tmp_path):
    """A host with 300 of 512 GiB free; this process is in a group without a limit, and that in one of 64 GiB."""
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "1:name=systemd:/other\n0::/job/step\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/step/memory.current": "5\n",
        "sys/fs/cgroup/job/memory.max": f"{64 * GIB}\n",
        "sys/fs/cgroup/job/memory.current": f"{62 * GIB}\n",
        "sys/fs/cgroup/job/memory.stat": f"anon 7\nactive_file {GIB}\ninactive_file {3 * GIB}\n",
    }
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    return tmp_path


def test_memory_is_that_of_the_host_and_of_each_limit(host):
    of_host, limited = Memory("the host", 512 * GIB, 300 * GIB), Memory("the control group", 64 * GIB, 6 * GIB)
    assert list(find_memory(host)) == [of_host, limited], "what files have cached can be freed"
    (host / "proc/self/cgroup").write_text("0::/\n")  # in a container
    (host / "sys/fs/cgroup/memory.max").write_text(f"{8 * GIB}")
    (host / "sys/fs/cgroup/memory.current").write_text("1")
    assert list(find_memory(host)) == [of_host, Memory("the control group", 8 * GIB, 8 * GIB - 1)]
    assert not list(find_memory(host / "nowhere"))


def test_memory_is_short_below_a_part_and_below_some_bytes():
    assert Memory("", 64 * GIB, GIB).is_short
    assert not Memory("", 64 * GIB, 2 * GIB).is_short
    assert not Memory("", 2048 * GIB, 5 * GIB).is_short, "of a large host, some GiB are enough"
    assert Memory("", 2048 * GIB, 3 * GIB).is_short


def test_problems_of_the_host_have_the_same_text_while_they_last(tmp_path, monkeypatch):
    monkeypatch.setattr(host_watch, "find_memory", lambda: [Memory("the host", 64 * GIB, 0)])
    found = [each.text for each in find_host_problems(tmp_path, 1 << 60)]
    assert found == [
        "the host has less than 2% of its 64 GiB free",
        f"the checkpoint folder {tmp_path} has less room than a checkpoint needs, 1.07e+09 GiB",
    ]
    assert len(list(find_host_problems(tmp_path, 1))) == 1
    assert len(list(find_host_problems(tmp_path / "later", 1 << 60))) == 1


def test_session_warns_once_before_its_checkpoints_have_no_room(tmp_path, monkeypatch):
    monkeypatch.setattr(node_health, "LOOK_SECONDS", 0.01)
    watch = NodeHealth.watch_checkpoints

    def watch_much(self, folder, nbytes):
        assert nbytes > 1000, "of the complete state"
        watch(self, folder, 1 << 60)

    monkeypatch.setattr(NodeHealth, "watch_checkpoints", watch_much)
    seen = []
    model = Model()
    optimizer = make_optimizer("adamw", model)
    where = Checkpoints(tmp_path / "saved", interval=1)
    session = Session(model, optimizer, ElasticSampler(SAMPLES, 4), checkpoints=where, on_event=seen.append)
    for step in session.steps(3):
        with step:
            step.backward(model(dataset()[step.indices]))
        wait_until(lambda: any(isinstance(each, SickNode) for each in seen), "the warning")
    (found,) = [each for each in seen if isinstance(each, SickNode)]
    assert (found.action, found.hardware) == ("warn", found.node)
    assert "has less room than a checkpoint needs" in found.problem
