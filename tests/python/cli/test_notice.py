"""Signals to the workers of `evermoe run`: the notice before a time limit, and a worker that stays stopped."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from cli.test_run import start
from evermoe import launch
from evermoe.checkpoint.checkpoint_folder import find
from evermoe.errors import REQUEUE_CODE

__all__ = ["start"]


def children(pid):
    """The processes that a process has started."""
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.timeout(240)
def test_the_notice_before_a_time_limit_ends_a_job_that_resumes_at_its_newest_step(start, tmp_path):
    saved = {"SAVED": str(tmp_path / "saved")}
    command = start("--workers", "2", "--restarts", "1", "train.py", "8", "100", **saved)
    command.wait_for("^step 6")
    for pid in [*children(command.process.pid), command.process.pid]:  # schedulers signal all processes of the job
        os.kill(pid, signal.SIGUSR1)
    code, said = command.end()
    assert code == REQUEUE_CODE, said
    assert said.count("SIGUSR1: this process leaves its job after the step") == 2
    assert "restarting it" not in said
    steps = [version % 2**40 for version in find(tmp_path / "saved")]
    assert len(steps) <= 2, "workers that get their signals in different steps leave one after the other"
    step = max(steps)
    assert step >= 6
    again = start("--workers", "2", "train.py", "8", "100", **saved)
    again.wait_for(f"continues from step {step}$")


@pytest.mark.long
def test_a_notice_to_workers_that_do_not_listen_yet_asks_to_requeue(start, tmp_path):
    (tmp_path / "slow.py").write_text("import os, time\nprint('up', flush=True)\ntime.sleep(600)\n")
    command = start("--workers", "2", "--restarts", "1", "slow.py")
    for _ in range(2):
        command.wait_for("up")
    command.process.send_signal(signal.SIGUSR2)
    code, said = command.end()
    assert code == REQUEUE_CODE, said


def test_a_worker_that_stays_stopped_is_killed_after_the_job_is_finished(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(launch, "STOPPED_SECONDS", 0.5)
    script = """
import os, pathlib, signal
if os.environ["LOCAL_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
pathlib.Path(os.environ["EVERMOE_FINISHED"]).touch()
"""
    job = launch.LocalJob([sys.executable, "-c", script], "stopped", 2, memory_dir=str(tmp_path))
    assert launch.run(job, 2, restarts=1) == launch.KILLED_CODE == 137
    said = capfd.readouterr().err
    assert "worker 1" in said
    assert "is stopped, and the job was finished 0.5 s ago: killing it" in said
    assert "restarting it" not in said


def test_stopped_workers_of_a_job_that_is_not_finished_are_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "STOPPED_SECONDS", 0.1)
    script = """
import os, signal, subprocess
resumer = subprocess.Popen(["sh", "-c", f"sleep 1; kill -CONT {os.getpid()}"])
os.kill(os.getpid(), signal.SIGSTOP)
"""
    job = launch.LocalJob([sys.executable, "-c", script], "paused", 1, memory_dir=str(tmp_path))
    assert launch.run(job, 1, restarts=0) == 0
