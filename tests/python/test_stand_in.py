"""The tests marked `gpu` on no GPU: torch's CUDA tensors in host memory, behind stand-ins of driver and runtime."""

import json
import os
import subprocess
import sys

import pytest
import torch

from evermoe.ops.cache import has_cuda_kernels
from support import stand_in
from support.kernels import ROOT, build

LATE, EARLY, RANDOM = 0, 1, 7
ELSEWHERE = "goes_back or inductor or compiled_out"
"""Of the ops' tests one that takes minutes here, and those that compile kernels for a GPU."""
STILL_RUNS = "given_later or later_work"
"""Tests of work that has not run yet, as it may have here if it need not be late."""
SHORT_COPIES = "CPU or free_memory or asked_for or let_go or digests_are or current_stream"
"""Captures and digests on each way through the code, in seconds."""
COPIES = [
    "snapshot/test_gpu_source.py",
    "state/test_gpu_digests.py",
    "comm/test_courier.py",
    "replay",
    "session/training/test_gradients.py",
    "ops/test_chunks.py",
    "ops/test_second_gpu.py",
]
CASES = {
    "copies late": (LATE, COPIES, ""),
    "captures and digests": (LATE, ["snapshot/test_gpu_source.py", "state/test_gpu_digests.py"], SHORT_COPIES),
    "copies early": (EARLY, COPIES, f"not ({STILL_RUNS})"),
    "examples of ops": (RANDOM, ["ops"], "example or second or refusals or launches"),
    "copies in any order": (RANDOM, COPIES, f"not ({STILL_RUNS})"),
    "every op": (EARLY, ["ops", "test_optim.py"], f"not ({ELSEWHERE} or {STILL_RUNS})"),
    "layers": (LATE, ["test_host_waits.py", "test_checkpointed_moe.py", "test_arbitrary_counts.py"], ""),
    "sessions": (LATE, ["session/training/test_one_gpu.py"], ""),
    "pipelines": (RANDOM, ["pipeline/test_pipeline_on_gpu.py"], ""),
    "groups over NCCL": (RANDOM, ["comm/test_nccl_groups.py"], ""),
    "aborts of NCCL": (RANDOM, ["comm/test_nccl_aborts.py"], ""),
    "sessions over NCCL": (LATE, ["session/training/test_several_gpus.py"], ""),
    "costs of a step": (LATE, ["session/training/test_step_costs.py"], ""),
    "a pipeline": (LATE, ["pipeline/test_pipeline_on_gpu.py"], "(1F1B and under_way) or told"),
}
IN_LONG = (
    "copies early",
    "copies late",
    "copies in any order",
    "every op",
    "sessions",
    "sessions over NCCL",
    "pipelines",
    "a pipeline",
    "groups over NCCL",
)


@pytest.fixture
def folder():
    """Folder of the stand-ins of driver, runtime and NCCL."""
    if torch.version.cuda is None or not has_cuda_kernels():
        pytest.skip("needs a torch with CUDA, and kernels in this build")
    place = ROOT / "target/emulator/driver"
    build(place, driver=1)
    return place


@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", [pytest.param(each, marks=[pytest.mark.long] * (each in IN_LONG)) for each in CASES])
def test_gpu_tests_pass_behind_stand_ins(tmp_path, folder, case):
    policy, paths, chosen = CASES[case]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short"]
    command += ["-m", "gpu and not chip", "-k", chosen, f"--basetemp={tmp_path / 'inner'}"]
    command += [str(ROOT / "tests/python" / path) for path in paths]
    run = subprocess.Popen(
        command,
        cwd=ROOT,
        env=stand_in.variables(folder, policy),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = run.communicate(timeout=380)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, 9)
        raise
    assert run.returncode == 0, said
    last = said.splitlines()[-1]
    assert " passed" in last and "skipped" not in last, said


@pytest.mark.long
def test_the_bench_of_aborts_runs_behind_stand_ins(tmp_path, folder):
    """So that it is known to work before there is a GPU, or several. Torch cannot capture graphs here."""
    (tmp_path / "sitecustomize.py").write_text("from support import stand_in\n", encoding="utf-8")
    paths = [str(tmp_path), str(ROOT / "tests/python"), *sys.path]
    command = [sys.executable, str(ROOT / "benches/bench_aborts.py"), "--rounds", "2", "--json", "found"]
    ran = subprocess.run(
        [*command, "--states", "graph", "waits", "queue"],
        cwd=tmp_path,
        env=stand_in.variables(folder, RANDOM) | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        check=False,
        timeout=400,
    )
    rows = json.loads((tmp_path / "found").read_text(encoding="utf-8"))["rows"]
    found = [(row["state"], row["result"], row["rounds"]) for row in rows]
    assert found == [("graph", "exit code 1", 0), ("waits", "back", 2), ("queue", "back", 2)]
    assert "capture_begin" in rows[0]["errors"], "the reason is in the results"
    assert [row["MiB"] for row in rows[1:]] == [0, 0]
    assert ran.returncode == 1
