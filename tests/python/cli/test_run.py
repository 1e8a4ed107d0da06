"""`evermoe run` as a user starts and stops it: what it says, what it keeps, and when it ends."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

import pytest

from evermoe.checkpoint.checkpoint_folder import find

LIMIT = 60.0
"""Seconds for what happens at once, on a busy machine: far less than `quorum_timeout`, 300 s."""
SCRIPT = """
import os, sys, torch, evermoe

width, last = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
layer = evermoe.MoE(width, 16, 4, top_k=1)
optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
data = torch.randn(100, 3, width)
session = evermoe.Session(layer, optimizer, evermoe.ElasticSampler(100, 8), replication=1,
                          preset=evermoe.presets.Auto(snapshot_interval=1),
                          membership=evermoe.Membership(join_interval=1), checkpoints=os.environ.get("SAVED"))
for step in session.steps(1000000 if last > 10 else 10):
    with step:
        step.backward(layer(data[step.indices]).square().mean())
    if step.committed and session.step >= last < 10:
        break
    if step.number in (0, 5):
        print("step", session.step, flush=True)
print("ended at", session.step, flush=True)
"""


class Command:
    """A running `evermoe run` with its own process group, as in a terminal, and what it has written."""

    def __init__(self, *arguments: str, folder: Path, **environment: str) -> None:
        # Unbuffered workers write a line in several pieces, between which others write.
        without = ("OMP_NUM_THREADS", "PYTHONUNBUFFERED")
        surroundings = {name: value for name, value in os.environ.items() if name not in without}
        self.process = subprocess.Popen(
            # What a shell starts in the background ignores this signal, and all that it starts; tests, too.
            ["env", "--default-signal=INT", sys.executable, "-m", "evermoe", "run", *arguments],
            cwd=folder,
            env=surroundings | environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.lines: list[str] = []
        self._queue: SimpleQueue[str | None] = SimpleQueue()
        Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(line)
        self._queue.put(None)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The next line that has the pattern."""
        while (line := self._queue.get(timeout=LIMIT)) is not None:
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found
        raise AssertionError(f"ended without {pattern!r}:\n{''.join(self.lines)}")

    def press_control_c(self) -> None:
        os.killpg(self.process.pid, signal.SIGINT)

    def end(self) -> tuple[int, str]:
        """Exit code and all lines."""
        code = self.process.wait(LIMIT)
        while (line := self._queue.get(timeout=LIMIT)) is not None:
            self.lines.append(line)
        return code, "".join(self.lines)


@pytest.fixture
def start(tmp_path):
    """`start(*arguments)` starts `evermoe run` with memory of its own; nothing is left of it."""
    commands = []
    memory = tmp_path / "memory"
    memory.mkdir(mode=0o700)
    (tmp_path / "train.py").write_text(SCRIPT)

    def start(*arguments, **environment):
        commands.append(Command("--memory-dir", str(memory), *arguments, folder=tmp_path, **environment))
        return commands[-1]

    yield start
    for command in commands:
        if command.process.poll() is None:
            command.process.send_signal(signal.SIGTERM)
            command.process.send_signal(signal.SIGTERM)
            command.process.wait(LIMIT)


@pytest.mark.timeout(200)
@pytest.mark.long
def test_loop_that_all_leave_early_keeps_the_memory_until_the_job_is_finished(start, tmp_path):
    code, said = start("--workers", "2", "train.py", "8", "4").end()
    assert code == 0, said
    assert "stopped before the last step; the same command resumes job train from" in said
    code, said = start("--workers", "2", "train.py", "16", "4").end()
    assert code == 1
    assert "ValueError" in said
    assert "the same command resumes" not in said
    assert "the job has not begun; memory of earlier runs of job train stays in" in said
    code, said = start("--workers", "2", "train.py", "8", "10").end()
    assert code == 0, said
    assert "continues from step 4" in said
    assert "ended at 10" in said
    assert list((tmp_path / "memory").iterdir()) == []


@pytest.mark.parametrize(
    ("line", "how", "code"),
    [("os.kill(os.getpid(), 9)", "was killed by signal 9", 137), ("sys.exit(3)", "ended with 3", 3)],
)
@pytest.mark.few(1)
def test_worker_that_fails_before_the_job_begins_ends_it_at_once(start, tmp_path, line, how, code):
    (tmp_path / "train.py").write_text(f"import os, sys\nif os.environ['LOCAL_RANK'] == '1': {line}\n{SCRIPT}")
    found, said = start("--workers", "2", "train.py", "8", "10").end()
    assert re.search(rf"worker 1 \(pid \d+\) {how}\n", said), said
    assert "the job cannot begin with 1 worker of 2: stopping what is left" in said
    assert found == code
    assert "Traceback" not in said


@pytest.mark.timeout(200)
def test_a_lost_worker_and_the_recovery_are_logged_once_and_what_asks_for_a_machine_is_called_once(start, tmp_path):
    killed = "if step.number == 4 and os.environ['LOCAL_RANK'] == '1': os.kill(os.getpid(), 9)"
    script = SCRIPT.replace("    with step:", f"    {killed}\n    with step:").replace("replication=1", "replication=2")
    (tmp_path / "train.py").write_text(script)
    note = f"echo $EVERMOE_LOST_KEY $EVERMOE_LOST_KIND >> {tmp_path}/asked"
    code, said = start("--workers", "3", "--on-lost", note, "train.py", "8", "10").end()
    assert code == 0, said
    assert said.count("ended at 10") == 2, said
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert re.fullmatch(r"\S+-\d+ process", asked)
    (lost,) = [line for line in said.splitlines() if line.startswith("lost ")]
    # The others may still be at the end of step 3, which then is not committed.
    step = re.search(r" in step ([34]): its process has ended, its host answers; 2 members left of 3$", lost)
    assert step is not None, lost
    (resumed,) = [line for line in said.splitlines() if line.startswith("training resumes")]
    begin = rf"training resumes at step {step[1]} with 2 members after \d+\.\d\d s \(agree .*verify \d"
    assert re.match(begin, resumed)
    assert resumed.endswith("; no committed step is lost")


@pytest.mark.timeout(200)
@pytest.mark.long
def test_control_c_lets_all_workers_leave_after_their_step(start, tmp_path):
    saved = tmp_path / "saved"
    command = start("--workers", "2", "train.py", "8", "1000", SAVED=str(saved))
    command.wait_for("step 6")
    command.press_control_c()
    code, said = command.end()
    assert code == 130
    assert "SIGINT: the workers complete their step and leave the job; a second one kills them" in said
    assert "stopped before the last step; the same command resumes job train from" in said
    assert "Traceback" not in said
    assert 1 <= len(find(saved)) <= 2  # the workers may leave at two steps, one after the other


@pytest.mark.long
def test_second_control_c_kills(start, tmp_path):
    sleep = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('here', flush=True)\nsignal.pause()\n"
    (tmp_path / "train.py").write_text(sleep)
    command = start("train.py")
    command.wait_for("here")
    command.press_control_c()
    command.wait_for("a second one kills")
    command.press_control_c()
    code, said = command.end()
    assert code == 130
    assert "Traceback" not in said


@pytest.mark.timeout(200)
def test_worker_is_added_by_the_command_that_is_printed(start, tmp_path):
    command = start("--workers", "1", "--members", "2", "train.py", "8", "10")
    address, added = command.wait_for(r"job train, Lighthouse (http://\S+); to add a worker: (.*)").groups()
    assert added.startswith(f"EVERMOE_LIGHTHOUSE={address} EVERMOE_JOB=train EVERMOE_MEMBERS=2 ")
    assert added.endswith(" python train.py 8 10")
    code, said = start("train.py").end()
    assert code == 2
    assert f"choose another --job, or add a worker to it: {added}" in said
    by_hand = added.replace(" python ", f" {sys.executable} ")
    done = subprocess.run(by_hand, shell=True, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert "ended at 10" in done.stdout
    assert command.end()[0] == 0


@pytest.mark.long
def test_processors_are_divided_among_workers(start, tmp_path):
    told = "import os, pathlib, time\nprint('threads', os.environ['OMP_NUM_THREADS'], flush=True)\n"
    (tmp_path / "train.py").write_text(told)
    mark = "mark = pathlib.Path('told')\nif os.environ['EVERMOE_ROLE'] == 'replica': mark.touch()\n"
    both = told + mark + "while not mark.exists(): time.sleep(0.01)\n"  # the replica is ended with the last worker
    (tmp_path / "both.py").write_text(both)
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert start("--workers", "1", "--replicas", "1", "both.py").end()[1].count(f"threads {threads}\n") == 2
    assert start("train.py", OMP_NUM_THREADS="7").end()[1].count("threads 7\n") == 1


@pytest.mark.long
@pytest.mark.timeout(200)
def test_job_outlives_the_machine_of_its_first_lighthouse(start, tmp_path):
    """Two machines host a Lighthouse each; the first one leaves with its worker and its Lighthouse."""
    (tmp_path / "train.py").write_text(SCRIPT.replace("in (0, 5)", "% 20 == 0"))
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        addresses = ",".join(f"http://127.0.0.1:{each.getsockname()[1]}" for each in (one, other))
    common = ["--members", "2", "--host-lighthouse", "--lighthouse", addresses, "train.py", "8", "11"]
    machines = {}
    for node in ("second", "first"):
        memory = tmp_path / node
        memory.mkdir(mode=0o700)
        machines[node] = start("--memory-dir", str(memory), *common, EVERMOE_NODE=node, SAVED=str(tmp_path / "saved"))
        machines[node].wait_for("job train, Lighthouse")
    machines["first"].wait_for("^step")
    machines["second"].press_control_c()
    code, said = machines["second"].end()
    assert code == 130, said
    reached = int(machines["first"].wait_for(r"^step (\d+)")[1])
    while int(machines["first"].wait_for(r"^step (\d+)")[1]) < reached + 200:
        pass
    machines["first"].press_control_c()
    code, said = machines["first"].end()
    assert code == 130, said
    assert "Traceback" not in said


SPARED = """
import os, torch, evermoe

torch.manual_seed(0)
layer = evermoe.MoE(8, 16, 4, top_k=1)
optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
data = torch.randn(100, 3, 8)
session = evermoe.Session(layer, optimizer, evermoe.ElasticSampler(100, 8), replication=1)
for step in session.steps(10**6):
    with step:
        step.backward(layer(data[step.indices]).square().mean())
    if step.number % 20 == 0:
        print("worker", os.environ["LOCAL_RANK"], "of", session.group.size, "at", session.step, flush=True)
"""


@pytest.mark.timeout(200)
@pytest.mark.long
def test_a_spare_takes_the_place_of_a_killed_worker_and_the_next_one_that_of_the_spare(start, tmp_path):
    (tmp_path / "spared.py").write_text(SPARED)
    command = start("--workers", "2", "--spare", "1", "--restarts", "1", "spared.py")
    command.wait_for("this worker is a spare: it waits until one of the 2 that train is missing")
    command.wait_for("worker . of 2 at")  # in a job that has not begun a spare waits for longer
    kill_worker(command.process.pid, 1)
    command.wait_for("worker 2 of 2 at")
    while sum("this worker is a spare" in line for line in command.lines) < 2:
        command.wait_for("this worker is a spare")
    assert any(re.search(r"worker 1 \(pid \d+\) was killed by signal 9; restarting it", each) for each in command.lines)
    kill_worker(command.process.pid, 2)
    command.wait_for("worker 1 of 2 at")
    command.process.send_signal(signal.SIGTERM)
    code, said = command.end()
    assert code == 128 + signal.SIGTERM, said


@pytest.mark.long
def test_a_spare_that_nobody_needed_ends_with_the_job(start, tmp_path):
    code, said = start("--workers", "2", "--spare", "1", "train.py", "8", "10").end()
    assert code == 0, said
    assert said.count("ended at 10") == 2, said


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_spare_of_another_machine_takes_the_place(start, tmp_path):
    (tmp_path / "spared.py").write_text(SPARED)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    command = start("--workers", "2", "spared.py")
    address = command.wait_for(r"Lighthouse (http://\S+);").group(1)
    alone = [
        "--workers",
        "0",
        "--spare",
        "1",
        "--members",
        "2",
        "--lighthouse",
        address,
        "--memory-dir",
        str(elsewhere),
    ]
    spare = start(*alone, "spared.py", EVERMOE_NODE="elsewhere")
    spare.wait_for("this worker is a spare: it waits until one of the 2 that train is missing")
    command.wait_for("worker . of 2 at")  # else the command ends, as the job cannot begin with one worker
    kill_worker(command.process.pid, 1)
    spare.wait_for("worker 0 of 2 at")
    for each in (command, spare):
        each.process.send_signal(signal.SIGTERM)
    assert [each.end()[0] for each in (command, spare)] == [128 + signal.SIGTERM] * 2


def kill_worker(parent, index):
    """Sends SIGKILL to the process that `evermoe run` has started last with this LOCAL_RANK."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    named = [pid for pid in children if f"LOCAL_RANK={index}\0" in Path(f"/proc/{pid}/environ").read_text()]
    os.kill(int(named[-1]), signal.SIGKILL)
