"""`evermoe top`: of members that answer, that do not, that were killed; by their metrics and by files of events."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace

import prometheus_client
import pytest

from evermoe.cli.main import main
from evermoe.config.environment import free_port
from evermoe.events import ChunkSent, Commit, CoverageChanged, Joined, Measured, Phase, Recovered
from evermoe.observe import JsonLines, Metrics
from evermoe.observe.member_view import Members, endpoints
from support.harness import FEWEST, free_ports, wait_until
from support.worker import Fault

LIMIT = 120.0
"""Seconds for a job to start, on a busy machine."""
SCRIPT = """
import torch, evermoe

torch.manual_seed(0)
layer = evermoe.MoE(16, 16, 6, top_k=2)
optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
data = torch.randn(100, 3, 16)
session = evermoe.Session(layer, optimizer, evermoe.ElasticSampler(100, 12))
for step in session.steps(1000000):
    with step:
        step.backward(layer(data[step.indices]).square().mean())
"""

RECOVERED = Recovered(0.0, {"agree": 0.25, "fetch": 2.0}, 7, 0, 3, "[a] is gone", 100, 1, {}, 9, 0, [])
RECOVERED = replace(RECOVERED, failure="host", tier="peers")


def member(listener, rank, node="n", generation=4):
    """Send a listener what a member of three has done."""
    for event in (
        Joined("moe", f"{node}-1", node, rank, "train", generation, ["l", "m", "n"]),
        CoverageChanged(1.0, 0.5, {"l + m": 2}, is_complete=True),
        RECOVERED,
        Measured(7, 0.5, 4000, 1.25, 2.5, {"snapshot": 1, "checkpoint": 3}, {"snapshot": 3_000_000}, 0, 0.0125, 4, 0.2),
        Commit(7, 0.125, 3, generation, 2.5, 4096, 32_000, 1.25),
    ):
        listener(event)
    return listener


def top(capsys, *arguments):
    """Exit code, output and errors; the table is as wide as it needs."""
    code = main(["top", *map(str, arguments)])
    found = capsys.readouterr()
    return code, found.out, found.err


@pytest.fixture
def wide(monkeypatch):
    """A terminal that is wide enough."""
    monkeypatch.setenv("COLUMNS", "220")


def test_members_by_rank_and_what_holds_of_all(capsys, wide):
    ports = sorted(free_port() for _ in range(3))
    member(Metrics(ports[0]), 1, "m")
    slow = member(Metrics(ports[1]), 0, "l")
    slow(CoverageChanged(0.5, 0.0, {"[l]": 3, "m + n": 1}, is_complete=False))
    slow(Phase("verify"))
    code, out, _ = top(capsys, f"127.0.0.1:{ports[0]}", ports[1], ports[2], "--once")
    assert code == 0
    assert "moe · step 8 · epoch 1.25 · 4,096 samples · 32,000 tokens · loss 0.125" in out
    assert "3 members training · generation 4 · 500 ms a step · 8,000 tokens/s" in out
    assert "imbalance of members 1.25 · of experts 2.50 · tokens at risk 1.25%" in out
    rows = [line for line in out.splitlines() if line.startswith("│")]
    assert [re.search(r"\w+:\d+", row)[0] for row in rows] == [
        f"localhost:{ports[1]}",
        f"1:{ports[0]}",
        f"localhost:{ports[2]}",
    ]
    assert "recovers: verify" in rows[0]
    assert "checkpoint 3, snapshot 1" in rows[1] and "40%" in rows[1]
    assert "snapshot 3 MB" in rows[1]
    assert "no answer: Connection refused" in rows[2]
    assert "a node is lost: survived with probability 0.5; two at once: 0; copies are missing and in progress" in out
    assert "not survived: the loss of [l] (3 units), m + n (1 unit)" in out
    said = "a host was lost, or cut off; units from peers; [a] is gone"
    assert f"2.25 s (agree 250 ms, fetch 2 s); {said}" in out


def test_members_of_one_node_differ_on_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    ports = [free_port() for _ in range(3)]
    for rank, port in enumerate(ports):
        listener = member(Metrics(port), rank)
        listener(Joined("moe", f"vm-0a1b2c3{rank}", "vm", rank, "train", 4, ["l", "m", "n"]))
    code, out, _ = top(capsys, *ports, "--once")
    assert code == 0
    table = [line for line in out.splitlines() if line.startswith(("│", "┃"))]
    assert max(map(len, table)) <= 80
    for rank in range(3):
        (row,) = [line for line in table if f"vm-0a1b2c3{rank}" in line]
        assert row.split("│")[1].strip() == str(rank)
    assert "…" not in out


def test_json_has_all_that_a_member_says(capsys):
    port = free_port()
    member(Metrics(port), 2)
    code, out, _ = top(capsys, port, "--once", "--json")
    (found,) = json.loads(out)["members"]
    assert code == 0
    assert (found["job"], found["node"], found["rank"], found["generation"]) == ("moe", "n", 2, 4)
    assert (found["step"], found["loss"], found["step_seconds"], found["tokens_per_second"]) == (8, 0.125, 0.5, 8000)
    assert found["lag"] == {"snapshot": 1, "checkpoint": 3}
    assert found["copied_bytes"] == {"snapshot": 3_000_000}
    assert (found["recovery_seconds"], found["recovery_reason"]) == ({"agree": 0.25, "fetch": 2.0}, "[a] is gone")
    assert (found["recovery_failure"], found["recovery_tier"]) == ("host", "peers")
    assert (found["survives_one"], found["survives_two"], found["is_covered"]) == (1.0, 0.5, True)
    assert found["fatal"] == {"l + m": 2}
    assert found["checkpoint_step"] is None
    assert (found["epoch"], found["samples"], found["tokens"], found["data_fraction"]) == (1.25, 4096, 32_000, 0.4)


def test_a_member_that_has_just_started_says_little(capsys, wide):
    port = free_port()
    Metrics(port)
    code, out, _ = top(capsys, port, "--once")
    assert code == 0
    assert "no job yet" in out
    assert "starting" in out
    assert "survived" not in out
    assert "recovery" not in out
    code, out, _ = top(capsys, port, "--once", "--json")
    (found,) = json.loads(out)["members"]
    assert {found["step"], found["loss"], found["is_covered"], found["rank"]} == {None}


def test_several_jobs_have_a_table_each(capsys, wide):
    ports = [free_port() for _ in range(2)]
    member(Metrics(ports[0]), 0)
    other = Metrics(ports[1])
    other(Joined("other", "x-1", "x", 0, "train", 1, ["x"]))
    code, out, _ = top(capsys, *ports, free_port(), "--once")
    assert code == 0
    assert [line.split(" ")[0] for line in out.splitlines() if " · " in line] == ["moe", "other"]
    assert out.count("no answer") == 1


def test_strangers_and_silence_are_said(capsys, wide):
    port, registry = free_port(), prometheus_client.CollectorRegistry()
    prometheus_client.Gauge("other", "of another program", registry=registry)
    prometheus_client.start_http_server(port, registry=registry)
    code, out, _ = top(capsys, port, "--once")
    assert code == 1
    assert "no member answers" in out
    assert "no answer: the endpoint has no metrics of evermoe" in out
    code, out, _ = top(capsys, "no.such.host.invalid:9400", "--once")
    assert code == 1
    assert "no answer: " in out


def test_who_a_silent_member_was_is_remembered():
    port = free_port()
    members = Members([str(port)])
    assert members.look()[0].problem == "Connection refused"
    metrics = member(Metrics(), 1)
    httpd, thread = prometheus_client.start_http_server(port, registry=metrics.registry)
    (view,) = members.look()
    assert (view.problem, view.node, view.rank) == ("", "n", 1)
    httpd.shutdown()
    httpd.server_close()
    thread.join()
    (view,) = members.look()
    assert view.problem
    assert (view.node, view.job, view.rank, view.step) == ("n", "moe", None, None)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("host", "expected PORT, HOST:PORT, HOST:FIRST-LAST or a file of JSON lines, got 'host'"),
        ("http://host:1", "expected PORT, HOST:PORT"),
        ("host:0", "port of 'host:0'"),
        ("host:70000", "70000"),
        ("9402-9400", "expected the first port, then the last"),
        ("", "expected PORT"),
    ],
)
def test_what_is_no_source_is_said(capsys, text, expected):
    code, _, err = top(capsys, text, "--once")
    assert code == 2
    assert err.startswith("evermoe top: ")
    assert expected in err


@pytest.mark.parametrize(
    ("package", "arguments"),
    [
        ("prometheus_client", ["top", "9400", "--once"]),
        ("prometheus_client", ["run", "--metrics", "9400", "none.py"]),
        ("tensorboard", ["run", "--tensorboard", "curves", "none.py"]),
    ],
)
def test_a_missing_package_is_said_before_anything_starts(monkeypatch, capsys, package, arguments):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(arguments) == 2
    assert capsys.readouterr().err == (f"evermoe {arguments[0]} needs {package}: pip install 'evermoe[observe]'\n")


def test_sources_are_ports_hosts_and_ranges():
    assert endpoints("9400-9402") == ["localhost:9400", "localhost:9401", "localhost:9402"]
    assert endpoints("gpu-1.cluster:9400-9400") == ["gpu-1.cluster:9400"]
    assert endpoints("[::1]:9400") == ["[::1]:9400"]
    assert endpoints(":9400") == ["localhost:9400"]


def test_a_wrong_pace_is_said(capsys):
    for text in ("0", "soon", "1e9", "nan"):
        with pytest.raises(SystemExit):
            main(["top", "9400", "--every", text])
        assert f"expected 0.05 to 3600 seconds, got '{text}'" in capsys.readouterr().err


def test_files_of_events_show_the_same(tmp_path, capsys, wide):
    path = tmp_path / "events.jsonl"
    lines = member(JsonLines(path), 1)
    members = Members([str(path)])
    (view,) = members.look()
    assert (view.rank, view.step, view.tokens_per_second, view.fatal) == (1, 8, 8000, {"l + m": 2})
    lines(Commit(8, 0.0625, 3, 4, 2.5))
    with path.open("a") as file:
        file.write('{"event": "commit", "time": 1, "pid":')  # is being written
    (view,) = members.look()
    assert (view.step, view.loss) == (9, 0.0625)
    with path.open("a") as file:
        file.write(f'{os.getpid()}, "step": 9, "loss": 0.25, "grad_norm": 1.0, "members": 3, "generation": 4}}\n')
    (view,) = members.look()
    assert (view.step, view.loss) == (10, 0.25)
    code, out, _ = top(capsys, path, "--once")
    assert code == 0
    assert "step 10" in out
    assert re.search(rf"\b{os.getpid()}\b", out)  # a cell of several lines, as a path is long


def test_a_kill_and_its_recovery_are_seen_in_files(start_job, tmp_path, capsys):
    job = start_job(3, **FEWEST)
    a, b, c = job.start_all({"b": [Fault("forward", 5)]}, steps=10)
    assert [each.join() for each in (a, b, c)] == [0, -9, 0]
    files = [each.options.events.with_name(f"{each.name}.{each.pid}.jsonl") for each in (a, b, c)]
    code, out, _ = top(capsys, *files, "--once", "--json")
    assert code == 0
    found = {view["node"]: view for view in json.loads(out)["members"]}
    recovered = {each.name: each.events("recovered")[-1] for each in (a, c)}
    for name in "ac":
        view = found[name]
        assert (view["state"], view["step"], view["members"]) == ("finished", 10, 2)
        assert view["recovery_seconds"] == pytest.approx(recovered[name]["seconds"])
        assert view["recovery_reason"] == recovered[name]["reason"]
        assert view["recoveries"] == len(next(each for each in (a, c) if each.name == name).events("recovered"))
        assert view["fatal"].keys() == {"a + c"}
    assert found["b"]["problem"] == ""  # each file is of one process, and does not know the others
    shared = tmp_path / "shared.jsonl"
    shared.write_text("".join(path.read_text() for path in files))
    found = {view.node: view for view in Members([str(shared)]).look()}
    assert [found[name].problem for name in "ac"] == ["", ""]
    assert re.fullmatch(r"no member since generation \d+", found["b"].problem)


@pytest.mark.timeout(400)
@pytest.mark.long
def test_a_running_job_whose_worker_is_killed(tmp_path, capsys, wide):
    memory, first = tmp_path / "memory", free_ports(3)
    memory.mkdir(mode=0o700)
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "evermoe", "run", "--workers", "3", "--metrics", str(first)]
    command += ["--tensorboard", "curves", "--memory-dir", str(memory), "train.py"]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    source = f"{first}-{first + 2}"

    def members():
        return json.loads(top(capsys, source, "--once", "--json")[1])["members"]

    def training(number):
        found = members()
        running = [view for view in found if view["state"] == "training" and view["members"] == number]
        # Copies for new members are made concurrently with the first steps: their coverage is known after that.
        is_ready = all(view["step"] > 5 and view["is_covered"] for view in running)
        return found if len(running) == number and is_ready else None

    try:
        found = wait_until(lambda: training(3), "three members train and are covered", LIMIT)
        assert {view["rank"] for view in found} == {0, 1, 2}
        assert {view["job"] for view in found} == {"train"}
        assert all(view["is_covered"] and view["survives_one"] == 1 for view in found)
        assert all(view["tokens_per_second"] > 0 and view["imbalance"] >= 1 for view in found)
        assert sum(view["copied_bytes"]["replayed"] for view in found) > 0
        victim = next(view for view in found if view["source"].endswith(str(first + 1)))
        children = subprocess.run(
            ["ps", "--ppid", str(process.pid), "-o", "pid="], capture_output=True, text=True, check=True
        ).stdout.split()
        listening = {pid: environment(pid).get("LOCAL_RANK") for pid in children}
        os.kill(int(next(pid for pid, number in listening.items() if number == "1")), signal.SIGKILL)
        found = wait_until(lambda: training(2), "two members train and are covered", LIMIT)
        gone = found[-1]
        assert gone["source"] == victim["source"]
        assert gone["problem"]
        for view in found[:2]:
            assert {"agree", "rebuild", "fetch", "verify"} <= view["recovery_seconds"].keys()
            assert view["generation"] > victim["generation"]
            assert view["fatal"].keys() == {"rank 0 + rank 1"}
        code, out, _ = top(capsys, source, "--once")
        assert code == 0
        assert "2 members training" in out
        assert re.search(r"last recovery, .* ago: .*agree .*rebuild .*fetch .*verify", out)
        assert "no answer" in out
    finally:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert len(list((tmp_path / "curves").glob("*-[012]/events.out.tfevents.*"))) == 3


def environment(pid):
    """Variables of a process."""
    with open(f"/proc/{pid}/environ", "rb") as file:
        return dict(part.decode().split("=", 1) for part in file.read().split(b"\0") if b"=" in part)


class Looks:
    """Counts how often metrics are read."""

    def __init__(self):
        self.count = 0

    def collect(self):
        """Of its own it has none."""
        self.count += 1
        return []


@pytest.mark.timeout(200)
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_it_looks_again_until_control_c(arguments):
    metrics, looks = member(Metrics(port := free_port()), 0), Looks()
    metrics.registry.register(looks)
    before = looks.count
    command = ["env", "--default-signal=INT", sys.executable, "-m", "evermoe", "top", str(port), "--every", "0.1"]
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: looks.count >= before + 3, "it looks three times", LIMIT)
    metrics(ChunkSent(9, 1, 2, "window"))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    if arguments:
        assert process.returncode == 130
        assert all(json.loads(line)["members"][0]["rank"] == 0 for line in out.splitlines())
        assert len(out.splitlines()) >= 2
    else:
        assert (process.returncode, err) == (0, "")
        assert "moe · step 8" in out
