"""`evermoe simulate` and `evermoe measure`: flags, files and messages."""

from __future__ import annotations

import json
import re

import pytest

from evermoe.cli.main import main
from evermoe.cli.simulate import simulation
from evermoe.cli.simulate.scenario_flags import duration
from evermoe.cli.simulate.simulation import Reporter
from evermoe.simulate import SCHEMES, read_constants
from support.commands import evermoe, evermoe_process

SMALL = ["--model", "gpt-s-moe", "--nodes", "8", "--step-seconds", "30", "--days", "0.5", "--mtbf", "30m"]


def test_table_json_and_plot(tmp_path):
    done = evermoe("simulate", *SMALL, "--seeds", "2", "--json", "out.json", "--plot", "out.png", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines[1:-3])) <= 100 and "\x1b" not in done.stdout
    for name in SCHEMES:
        assert any(line.strip().startswith(name) for line in lines), name
    assert "has the most goodput. Its lost time:" in done.stdout
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    found = json.loads((tmp_path / "out.json").read_text())
    assert set(found["presets"]) == set(SCHEMES)
    auto = found["presets"]["auto"]
    assert sum(auto["outcomes"][0]["nanoseconds"].values()) == 43_200 * 10**9
    assert auto["half_intervals"]["ettr"] > 0
    assert auto["means"]["ettr"] == pytest.approx(sum(each["ettr"] for each in auto["outcomes"]) / 2)


def test_a_trace_and_files(tmp_path):
    (tmp_path / "spot.csv").write_text("0,add,a\n0,add,b\n0,add,c\n600000,remove,b\n900000,add,d\n")
    (tmp_path / "cluster.json").write_text('{"nodes": 3, "spares": 1, "nodes_per_rack": 2}')
    flags = "--model gpt-s-moe --step-seconds 30 --trace spot.csv --days 0.05 --seeds 1 --presets auto restart"
    done = evermoe("simulate", *flags.split(), "--cluster", "cluster.json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "on 3 nodes and 1 spare" in done.stdout
    more = "--maintenance 1h,1,5m --stragglers 1h,1.5,5m --rack-mtbf 5h --option replication=1 --takes-over"
    done = evermoe("simulate", *SMALL, "--seeds", "1", *more.split(), "--nodes-per-rack", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr


def test_missing_copies_are_named_below_the_table(tmp_path):
    flags = [*SMALL, "--seeds", "1", "--presets", "gemini", "auto", "restart", "--cluster", "cluster.json"]
    lines = []
    for room in (1 << 40, 10**9):
        (tmp_path / "cluster.json").write_text(json.dumps({"host_bytes": room}))
        done = evermoe("simulate", *flags, "--json", "out.json", folder=tmp_path)
        assert done.returncode == 0, done.stderr
        means = {
            name: each["means"] for name, each in json.loads((tmp_path / "out.json").read_text())["presets"].items()
        }
        missing = {name: each["missing_copy_bytes"] for name, each in means.items() if each["missing_copy_bytes"]}
        assert set(missing) == (set() if room > 10**9 else {"gemini", "auto"})
        lines.append([line for line in done.stdout.splitlines() if "fit into" in line])
    assert lines[0] == []
    gigabytes = {name: f"{lacks / 1e9:,.0f} GB" for name, lacks in missing.items()}
    assert lines[1][0].startswith(
        "Not all copies fit into the 1 GB of host memory that each node has free (host_bytes in the file of "
        f"--cluster). Over all nodes gemini lacks {gigabytes['gemini']}, auto lacks {gigabytes['auto']}. State without"
    )


def test_progress_goes_to_standard_error_at_the_start_and_now_and_then(capsys):
    reporter = Reporter(["auto", "pec"], interval=0.0)
    reporter(0.5)
    reporter.end_preset()
    reporter(1.0)
    out, err = capsys.readouterr()
    assert out == ""
    begun, first, last = err.splitlines()
    assert begun == "evermoe simulate: simulating auto, pec"
    assert re.fullmatch(r"evermoe simulate: auto, 1 of 2: 50% after \d+ s in all, about \d+ s left", first)
    assert last.startswith("evermoe simulate: pec, 2 of 2: 100% after ")
    Reporter(["auto"], interval=60.0)(0.5)
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_each_preset_reports(capsys, monkeypatch):
    monkeypatch.setattr(simulation, "Reporter", lambda presets: Reporter(presets, interval=0.0))
    assert main(["simulate", *SMALL, "--seeds", "1", "--presets", "auto", "restart"]) == 0
    err = capsys.readouterr().err
    assert "auto, 1 of 2: " in err and "restart, 2 of 2: " in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model gpt-s-moe --nodes 8", "missing: --step-seconds, those of a step on all nodes"),
        ("--model none --nodes 8 --step-seconds 1", "model: expected a file or one of"),
        ("--model gpt-s-moe --step-seconds 1", "--nodes"),
        ("--model gpt-s-moe --step-seconds 1 --nodes 2 --option speed=1", "--option: expected NAME=VALUE"),
        (
            "--model gpt-s-moe --step-seconds 1 --nodes 2 --option replication=x",
            "--option replication: expected a number",
        ),
        (
            "--model gpt-s-moe --step-seconds 1 --nodes 2 --maintenance 1d,2",
            "--maintenance: expected a time, a whole number",
        ),
        (
            "--model gpt-s-moe --step-seconds 1 --nodes 2 --maintenance 1d,2.5,30m",
            "a whole number and a time, such as 1d,4,30m, got '1d,2.5,30m'",
        ),
        (
            "--model gpt-s-moe --step-seconds 1 --nodes 2 --stragglers 2h,2m,10m",
            "--stragglers: expected a time, a number",
        ),
        ("--model gpt-s-moe --step-seconds 1 --nodes 2 --rack-mtbf 1h", "--nodes-per-rack, which --rack-mtbf needs"),
        ("--model gpt-s-moe --step-seconds 1 --nodes 2 --seeds 0", "--seeds"),
        ("--model gpt-s-moe --step-seconds 1 --nodes 2 --mtbf soon", "expected a time such as 90s"),
        ("--model gpt-s-moe --step-seconds 1 --nodes 2 --constants none.json", "No such file"),
        ("--model gpt-s-moe --step-seconds 1 --nodes 2 --trace none.csv", "No such file"),
    ],
)
def test_wrong_values_are_named_with_their_flag(flags, message, tmp_path):
    done = evermoe("simulate", *flags.split(), folder=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr, done.stderr


def test_times():
    assert [duration(text) for text in ("90", "1ms", "2s", "10m", "1.5h", "2d")] == [90, 1e-3, 2, 600, 5400, 172_800]


@pytest.mark.long
def test_measures_this_machine(tmp_path):
    done = evermoe_process("measure", "--out", "here.json", "--no-session", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    constants = read_constants(tmp_path / "here.json")
    assert constants.source.startswith("measured")
    assert 1e-7 < constants.network_latency_seconds < 0.1
    for name in ("network", "digest", "capture", "store_write", "store_read"):
        assert 1e6 < getattr(constants, f"{name}_bytes_per_second") < 1e13, name
    assert [path.name for path in tmp_path.iterdir()] == ["here.json"]
    flags = ["--presets", "auto", "--seeds", "1", "--constants", "here.json"]
    done = evermoe("simulate", *SMALL, *flags, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "costs measured by evermoe measure" in done.stdout
