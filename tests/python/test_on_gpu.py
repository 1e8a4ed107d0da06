"""The commands for a machine with a GPU start, and end well on one without."""

import argparse
import ast
import importlib
import json
import re
import subprocess
import sys

import pytest
import torch

from support import on_gpu
from support.commands import script
from support.kernels import ROOT

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")


@pytest.mark.parametrize("what", ["test", *(pytest.param(each, marks=pytest.mark.long) for each in on_gpu.COMMANDS)])
def test_no_gpu_is_no_failure(what):
    command = [sys.executable, on_gpu.__file__, what]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    assert "skipped: no CUDA device" in ran.stdout


@pytest.mark.parametrize("name", on_gpu.BENCHES)
def test_the_options_of_the_benches_exist(tmp_path, name):
    options = ["--device", "cuda", *on_gpu.BENCHES[name][1], "--json", "unused"]
    ran = script(ROOT / "benches" / f"bench_{name.partition('-')[0]}.py", *options, folder=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "skipped" in ran.stdout


def test_the_limits_keep_each_command_under_ten_minutes():
    assert on_gpu.TEST_SECONDS + len(on_gpu.CHECKS) * on_gpu.CHECK_SECONDS < 480
    tests = {"contact": on_gpu.CONTACT_SECONDS, "node": on_gpu.NODE_SECONDS}
    for command, names in on_gpu.COMMANDS.items():
        assert tests.get(command, 0) + sum(on_gpu.BENCHES[name][0] for name in names) < 600, command
    assert set().union(*on_gpu.COMMANDS.values()) == set(on_gpu.BENCHES)


@pytest.mark.long
def test_the_results_of_a_run_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(on_gpu, "OUT", tmp_path)
    found = on_gpu.pytest(
        on_gpu.environment(), 100, tmp_path / "report.xml", "tests/python/ops/test_ops.py", "-k", "test_histogram"
    )
    assert found["status"] == 0
    assert found["tests"] == found["skipped"] > 0
    assert found["failed"] == []
    on_gpu.write("some", found)
    assert json.loads((tmp_path / "some.json").read_text()) == found


def test_a_command_that_takes_too_long_is_interrupted_with_all_that_it_has_started(tmp_path):
    report = tmp_path / "said"
    child = f"trap 'echo enough > {report}; exit 1' INT; sleep 60"  # a Python may not have begun after these seconds
    assert on_gpu.limited(["sh", "-c", 'sh -c "$1"; true', "sh", child], 3, None) == "time-out"
    assert report.read_text() == "enough\n"
    assert on_gpu.limited([sys.executable, "-c", "raise SystemExit(3)"], 20, None) == 3


COUNTED = """\
==PROF== Connected to process 1
"ID","Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum","dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"gpu__time_duration.sum","sm__warps_active.avg.pct_of_peak_sustained_active"
"","","byte","byte","%","ns","%"
"0","void at::native::copying<(int)4, float>(int, T1)","1,024","1024","90.5","2,000","50"
"1","invert_positions","8","16","1","500","25"
"2","unpermute_backward_bf16_f32_i32","32","64","80","1500","75"
"""


def test_the_counters_of_kernels_are_read_by_op(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benches")
    bench_kernels = importlib.import_module("bench_kernels")
    found = [(op, kernel, values["us"], values["read"]) for op, kernel, values in bench_kernels.read(COUNTED)]
    assert found == [
        ("copy", "at::native::copying", 2.0, 1024.0),
        ("unpermute_backward", "invert_positions", 0.5, 8.0),
        ("unpermute_backward", "unpermute_backward_bf16_f32_i32", 1.5, 32.0),
    ]


def test_without_counters_ops_are_timed_relative_to_a_copy(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "benches")
    bench_kernels = importlib.import_module("bench_kernels")
    least = {op.name: op.least for op in bench_kernels.OPS}
    took = {"copy": 500.0, **{name: 10.0 + number for number, name in enumerate(least)}}
    monkeypatch.setattr(bench_kernels, "times", lambda seconds: iter(took.items()))
    monkeypatch.setattr(bench_kernels, "where", lambda device: "a GPU")
    report = tmp_path / "report"
    bench_kernels.show_times(argparse.Namespace(seconds=0.0, json=str(report), device="cpu"))
    rows = {row["op"]: row["of copy"] for row in json.loads(report.read_text())["rows"]}
    rate = 2 * bench_kernels.COPIED / 500.0
    assert rows == {name: pytest.approx(least[name] / took[name] / rate) for name in least}


def needs_gpu(path):
    """Whether a file has tests with the mark `gpu`, or some that run on each `device`, of which one is a GPU."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "pytest.mark.gpu":
            return True
        is_test_or_fixture = isinstance(node, ast.FunctionDef) and (node.name[:5] == "test_" or node.decorator_list)
        if is_test_or_fixture and "device" in [each.arg for each in node.args.args]:
            return True
    return False


def test_every_file_with_tests_that_need_a_gpu_is_in_the_list():
    tests = ROOT / "tests/python"
    found = [path.relative_to(tests).as_posix() for path in tests.rglob("test_*.py") if needs_gpu(path)]
    assert len(found) > 20
    assert [path for path in sorted(found) if not path.startswith(on_gpu.TESTS)] == []
    assert [place for place in on_gpu.TESTS if not any(path.startswith(place) for path in found)] == []


def test_each_op_has_an_example_for_the_sanitizer():
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu", *on_gpu.SANITIZED]
    listed = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True, cwd=ROOT).stdout
    for name in ("histogram", "plan", "permute", "regroup", "split", "test_adamw", "test_sgd", "test_chunks"):
        assert any(name in line for line in listed.splitlines() if "::" in line), name


def test_each_kernel_is_checked(library):
    lists = [path.read_text() for path in library.parent.glob("*.kernels.cpp")]
    names = [name for text in lists for name in re.findall(r"EVERMOE_KERNEL\((\w+)", text)]
    assert len(names) > 20
    assert [name for name in names if not name.startswith(on_gpu.KERNELS)] == []
