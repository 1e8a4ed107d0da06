"""The command line as a user types it: exit codes and messages."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from evermoe.process.memory_folder import job_folder
from support.commands import evermoe, evermoe_process

SMALL = ["--layers", "1", "--hidden", "32", "--heads", "2", "--intermediate", "32", "--sequence", "32", "--batch", "12"]


@pytest.mark.long
def test_demo_survives_a_kill_and_a_join_and_says_so(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    run = ["--workers", "3", "--steps", "24", "--kill", "1@5", "--join", "8", "--no-baseline"]
    done = evermoe_process(
        *("demo", *run, *SMALL, "--data", str(text)),
        *("--json", "out.json", "--plot", "out.png", "--trace", "trace.json"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker 1 is killed in the middle of step 5" in done.stdout
    assert "passed: no step lost" in done.stdout
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["ok"] and result["joined"] and result["verified_at_end"]
    assert (result["steps_committed"], result["steps_lost"], result["digests_mismatched"]) == (24, 0, 0)
    assert result["digests_checked"] > 0
    assert result["loss_last"] < result["loss_first"]
    episode = result["episodes"][0]
    assert (episode["killed"], episode["step"], episode["members"]) == ([1], 5, 2)
    assert set(episode["seconds"]) == {"detect", "agree", "rebuild", "fetch", "verify", "repeat"}
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    for rank in range(3):  # two survivors and the one who joined
        names = {event["name"] for event in events if event["pid"] == rank}
        assert {"forward", "backward", "optimizer AdamW", "all_to_all", "all_reduce", "window"} <= names


@pytest.mark.long
def test_demo_fails_when_too_much_is_lost(tmp_path):
    run = ["--workers", "2", "--steps", "8", "--kill", "1@4", "--no-join", "--replication", "1", "--expert-slots", "1"]
    done = evermoe_process("demo", *run, *SMALL, "--experts", "3", "--top-k", "1", "--no-baseline", folder=tmp_path)
    assert done.returncode == 1
    assert "LostExperts" in done.stdout
    assert "blocks.0.moe.experts." in done.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kill", "9@3"], "--kill 9@3: expected a rank below 4"),
        (["--kill", "1@900"], "a step below 60"),
        (["--kill", "one"], "expected RANK@STEP, e.g. 2@20, got 'one'"),
        (["--kill", "1@3", "--kill", "1@4"], "a worker dies only once"),
        (["--workers", "1", "--kill", "0@3"], "at least one survivor"),
        (["--join", "60"], "--join: expected a step below 60, got 60"),
        (["--data", "missing.txt"], "found no file"),
        (["--replication", "-1"], "expected replication to be a whole number, >= 0, got -1"),
        (["--hang-timeout", "inf"], "expected hang_timeout"),
        (["--batch", "0"], "expected --batch to be a whole number, >= 1"),
    ],
)
@pytest.mark.few(2)
def test_demo_refuses_what_cannot_work(tmp_path, flags, message):
    done = evermoe("demo", *flags, folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr


SCRIPT = """
import os, signal, sys
import torch, evermoe
from evermoe import events

layer = evermoe.MoE(8, 16, 4, top_k=1)
optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
data = torch.randn(100, 3, 8)
first = not os.path.exists("crashed")

def on_event(event):
    if isinstance(event, events.Vote) and event.step == 4 and first and os.environ["LOCAL_RANK"] == sys.argv[1]:
        open("crashed", "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    if isinstance(event, events.Recovered) and event.step >= 4:
        print("sources", event.sources, flush=True)

session = evermoe.Session(layer, optimizer, evermoe.ElasticSampler(100, 8), on_event=on_event,
                          membership=evermoe.Membership(hang_timeout=10))
for step in session.steps(8):
    with step:
        step.backward(layer(data[step.indices]).square().mean())
print("finished at", session.step, flush=True)
"""


@pytest.mark.long
def test_run_restarts_a_crashed_worker_which_rejoins(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = evermoe_process("run", "--workers", "2", "--restarts", "1", "train.py", "1", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"worker 1 \(pid \d+\) was killed by signal 9; restarting it", done.stderr)
    assert "local memory" in done.stdout
    assert done.stdout.count("finished at 8") >= 1
    assert not job_folder("/dev/shm", "train").exists()


def test_run_says_what_is_wrong(tmp_path):
    assert "expected a SCRIPT" in evermoe("run", folder=tmp_path).stderr
    assert "a worker, a replica or a spare" in evermoe("run", "--workers", "0", "x.py", folder=tmp_path).stderr
    alone = evermoe("run", "--workers", "0", "--replicas", "1", "x.py", folder=tmp_path)
    assert "expected --members" in alone.stderr
    assert "--members: expected 1 or more" in evermoe("run", "--members", "0", "x.py", folder=tmp_path).stderr
    for flag, value in (("--workers", "99999999999"), ("--members", "-3"), ("--restarts", "-1"), ("--workers", "x")):
        done = evermoe("run", flag, value, "x.py", folder=tmp_path)
        assert done.returncode == 2
        assert f"argument {flag}: expected 0 to 4096, got '{value}'" in done.stderr
    done = evermoe("run", "--memory-dir", "/proc", "x.py", folder=tmp_path)
    assert done.returncode == 2
    assert "evermoe run: memory_dir /proc: cannot create the job's folder in it" in done.stderr
    assert "Traceback" not in done.stderr


def test_run_ends_with_the_exit_code_of_the_script(tmp_path):
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    assert evermoe_process("run", "broken.py", folder=tmp_path).returncode == 3


@pytest.mark.parametrize("job", ["x/../../precious", "../x", "a/b", "", "a\nb", ".x"])
def test_run_takes_no_path_for_the_name_of_a_job(tmp_path, job):
    memory, precious = tmp_path / "memory", tmp_path / "precious"
    memory.mkdir()
    precious.mkdir()
    (precious / "file").write_text("of years")
    (memory / "evermoe-x").mkdir()
    (tmp_path / "train.py").write_text("")
    done = evermoe("run", "--memory-dir", str(memory), f"--job={job}", "train.py", folder=tmp_path)
    assert done.returncode == 2
    assert "expected --job to be a name of 1 to 100 letters" in done.stderr
    assert (precious / "file").read_text() == "of years"


@pytest.mark.parametrize("missing", ["rich", "matplotlib"])
def test_demo_says_what_to_install(tmp_path, missing):
    done = evermoe_process("demo", folder=tmp_path, missing=missing)
    assert done.returncode == 2
    assert f"evermoe demo needs {missing}" in done.stderr
    assert "evermoe[cli,plot]" in done.stderr


def test_info_names_versions(tmp_path):
    done = evermoe("info", folder=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("evermoe ") and "torch " in done.stdout
    found = json.loads(evermoe("info", "--json", folder=tmp_path).stdout)
    assert found.keys() == {"evermoe", "cuda_kernels", "torch", "cuda_devices"}
    assert f"evermoe {found['evermoe']}, " in done.stdout and f"torch {found['torch']}, " in done.stdout


HELP = """
import contextlib, io, json, sys
from evermoe.cli.main import parser
LARGE = {"torch", "transformers", "matplotlib", "rich"}
(commands,) = [each for each in parser()._actions if each.dest == "command"]
found = {}
for command in [None, *commands.choices]:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        parser(command).parse_args([command, "--help"] if command else ["--help"])
    found[command or ""] = out.getvalue()[:14], sorted(LARGE & sys.modules.keys())
print(json.dumps(found))
"""


def test_every_command_has_help_which_loads_nothing_large(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", HELP], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {"demo", "export", "checkpoints", "measure", "info", "simulate", "top"} < found.keys()
    assert {name: each for name, each in found.items() if each != ["usage: evermoe", []]} == {}
