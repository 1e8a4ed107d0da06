"""Hardware that is faulty: it is tested before a process joins, watched while it trains, and refused afterwards."""

from __future__ import annotations

import signal

import pytest
import torch
from torch.overrides import TorchFunctionMode

from evermoe.cli.main import main as run_command
from evermoe.comm.quarantine import find_hardware
from evermoe.session import gpu_health
from evermoe.session.gpu_health import Gpu, Problem
from evermoe.session.self_test import find_fault
from support import nvml
from support.history import check_history
from support.worker import EVERYTHING, Fault

GATE, STEPS = 6, 30
FLIPPED = 8
EVERYWHERE = {"preset": "lazarus", "replication": 3, "expert_slots": 10, "min_replicas": 3, "rebalance_interval": 0}


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def start_gpus(start_job, library, tmp_path):
    """`start_gpus(job, names)` starts workers with GPUs. They are returned, and the files of their reports."""

    def start(job, names="abc", **options):
        reports = {name: tmp_path / f"{name}.reports" for name in names}
        workers = {}
        for name in names:
            variables = {nvml.LIBRARY: str(library), nvml.REPORTS: str(reports[name])}
            workers[name] = job.start(name, kind=nvml.GpuWorker, environment=variables, **options)
        return workers, reports

    return start


# ---- while it trains


@pytest.mark.quick("a worker's GPU reports a fault")
def test_member_with_a_fault_leaves_after_its_step_and_its_hardware_is_refused(start_job, start_gpus):
    job = start_job()
    job.open_gate(GATE)
    workers, reports = start_gpus(job, steps=STEPS, gated=True)
    for each in workers.values():
        each.wait_for("gate", step=GATE)
    nvml.report(reports["b"], "xid 13", "xid 95")  # the first is an application's
    found = workers["b"].wait_for("sick_node")
    assert (found["hardware"], found["action"]) == ("GPU-of-b", "evict")
    assert found["problem"] == "Xid 95: an uncontained error of its memory"
    job.open_gate(GATE + 4)
    assert workers["b"].join() == 143
    assert workers["b"].events("commit")[-1]["step"] in (GATE, GATE + 1), "the first member leaves after odd steps"
    for name in "ac":
        recovered = workers[name].wait_for("recovered", count=2)
        assert (recovered["steps_lost"], recovered["members"], recovered["failure"]) == (0, 2, "left")
        reduced = [event["step"] for event in workers[name].events("reduce")]
        assert reduced == sorted(set(reduced)), "no gradient was computed twice"

    again, _ = start_gpus(job, "b", steps=STEPS, gated=True)
    job.open_gate(EVERYTHING)
    assert again["b"].join() == 1
    (failed,) = again["b"].events("failed")
    assert failed["error"] == "UnfitNode"
    assert "GPU-of-b of b, which b-" in failed["message"]
    assert "Xid 95" in failed["message"] and "--lift GPU-of-b" in failed["message"]
    assert [workers[name].join() for name in "ac"] == [0, 0]
    check_history([*workers.values()])


def test_the_last_member_that_trains_stays(start_job, start_gpus):
    job = start_job(1)
    job.open_gate(GATE)
    workers, reports = start_gpus(job, "a", steps=STEPS, gated=True)
    workers["a"].wait_for("gate", step=GATE)
    nvml.report(reports["a"], "xid 79")
    workers["a"].wait_for("sick_node")
    job.open_gate(EVERYTHING)
    assert workers["a"].join() == 0


def test_if_all_have_a_fault_one_stays(start_job, start_gpus):
    job = start_job(2)
    job.open_gate(GATE)
    workers, reports = start_gpus(job, "ab", steps=STEPS, gated=True)
    for name, each in workers.items():
        each.wait_for("gate", step=GATE)
        nvml.report(reports[name], "xid 119")
        each.wait_for("sick_node")
    job.open_gate(EVERYTHING)
    assert sorted(each.join() for each in workers.values()) == [0, 143]
    check_history([*workers.values()])


def test_members_leave_for_faults_only_and_only_as_the_option_says(start_job, start_gpus):
    """A pending remap of rows is none; with `on_sick="warn"` nothing is. Each problem is reported once."""
    job = start_job(2, on_sick="warn")
    job.open_gate(GATE)
    workers, reports = start_gpus(job, "ab", steps=STEPS, gated=True)
    workers["b"].wait_for("gate", step=GATE)
    nvml.report(reports["b"], "xid 63", "xid 79", "xid 79", "xid 31", "xid 74")
    workers["b"].wait_for("sick_node", count=3)
    job.open_gate(EVERYTHING)
    assert [each.join() for each in workers.values()] == [0, 0]
    found = [(each["problem"].split(":")[0], each["action"]) for each in workers["b"].events("sick_node")]
    assert found == [("Xid 63", "warn"), ("Xid 79", "warn"), ("Xid 74", "warn")]


# ---- before it joins


def test_a_spare_whose_gpu_reports_a_fault_does_not_join(start_job, start_gpus):
    job = start_job(2)
    job.open_gate(GATE)
    workers, _ = start_gpus(job, "ab", steps=STEPS, gated=True)
    spare, reports = start_gpus(job, "s", steps=STEPS, session={"role": "spare"})
    spare["s"].wait_for("phase", phase="agree")
    nvml.report(reports["s"], "xid 95")
    spare["s"].wait_for("sick_node")
    for each in workers.values():
        each.wait_for("gate", step=GATE)
    workers["b"].signal(signal.SIGKILL)
    job.open_gate(EVERYTHING)
    assert [workers["a"].join(), spare["s"].join()] == [0, 1]
    assert spare["s"].events("failed")[0]["error"] == "UnfitNode"


@pytest.mark.parametrize("policy", ["evict", "warn", "ignore"])
@pytest.mark.quick("a process starts on hardware that is faulty")
def test_process_with_a_faulty_gpu_does_not_join(start_job, start_gpus, tmp_path, policy):
    job = start_job(1, on_sick=policy)
    nvml.report(tmp_path / "a.reports", "failed 1")
    workers, _ = start_gpus(job, "a", steps=3)
    assert workers["a"].join() == (policy == "evict")
    if policy == "evict":
        (failed,) = workers["a"].events("failed")
        assert failed["error"] == "UnfitNode"
        assert "GPU-of-a of a is faulty: a row of its memory could not be remapped" in failed["message"]
        assert not workers["a"].events("phase"), "it has asked for no members"
    assert len(workers["a"].events("sick_node")) == (policy == "warn")


class Wrong(TorchFunctionMode):
    """Changes the results of the calls of one function from the `first` on."""

    def __init__(self, function, first, factor):
        super().__init__()
        self.function, self.first, self.factor = function, first, factor

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function is not self.function:
            return result
        self.first -= 1
        if self.first < 0:
            result.view(-1)[5] *= self.factor
        return result


@pytest.mark.parametrize(
    ("function", "first", "factor", "why"),
    [
        (torch.matmul, 1, 1 + 1e-6, "other bits the second time"),
        (torch.matmul, 0, 9, "is wrong by"),
        (torch.Tensor.fill_, 0, 3, "1 of 524288 words of memory do not hold what was written"),
        (torch.Tensor.fill_, 1, 3, "1 of 524288 words of memory do not hold what was written"),
    ],
)
def test_wrong_products_and_memory_are_found(function, first, factor, why):
    before = torch.get_rng_state()
    assert not find_fault(torch.device("cpu"))
    with Wrong(function, first, factor):
        assert why in find_fault(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)


# ---- NVML


def test_states_of_a_gpu(library, tmp_path, monkeypatch):
    monkeypatch.setenv(nvml.REPORTS, str(tmp_path / "reports"))
    nvml.load(library)
    nvml.report(tmp_path / "reports", "errors 2")
    gpu = Gpu("GPU-1")
    assert not gpu.problems(), "errors before the process began are known to the driver"
    cases = {
        "errors 3": ("new uncorrectable errors of its memory", False),
        "hot 1": ("the GPU is slowed down, as it is too hot", False),
        "pending 1": ("a row of its memory will be remapped at the next reset", False),
        "failed 1": ("a row of its memory could not be remapped", True),
        "recovery 1": ("the driver demands a reset of the GPU", True),
        "recovery 4": ("the driver demands a recovery action 4", False),
    }
    for line, expected in cases.items():
        (tmp_path / "reports").write_text("errors 2\n")
        nvml.report(tmp_path / "reports", line)
        assert gpu.problems() == [Problem(*expected)], line
    nvml.report(tmp_path / "reports", "lost 1")
    assert Problem("NVML: GPU is lost", True) in gpu.problems()
    gpu.close()


def test_no_xid_is_both_a_fault_and_none():
    assert not gpu_health.FAULTS.keys() & gpu_health.CONCERNS.keys()
    applications = {13, 31, 32, 43, 45, 68}  # of NVIDIA's catalog: the application is at fault, or was stopped
    assert applications.isdisjoint([*gpu_health.FAULTS, *gpu_health.CONCERNS])


@pytest.mark.gpu
@pytest.mark.chip
def test_nvml_of_a_real_gpu():
    hardware = find_hardware("a", torch.device("cuda"))
    assert hardware.startswith("GPU-")
    gpu = Gpu(hardware)
    assert gpu.has_events
    assert gpu.wait(0.01) is None
    assert not [each for each in gpu.problems() if each.is_fault]
    gpu.close()
    assert not find_fault(torch.device("cuda"))


# ---- quarantine


@pytest.mark.quick("a worker that left as corrupt or faulty is started again on the same hardware")
def test_corrupt_member_is_refused_on_its_node_until_an_operator_lifts_it(start_job, capsys):
    job = start_job(on_corruption="evict", join_interval=2, **EVERYWHERE)
    flip = Fault("begin", FLIPPED, "flip", where="dense")
    workers = job.start_all({"b": [flip]}, steps=4000, slow=0.02)
    assert workers[1].join() == 1
    assert "CorruptState" in workers[1].log()
    workers[0].wait_for("recovered", members=2)
    refused = job.start("b", steps=4000)
    assert refused.join() == 1
    (failed,) = refused.events("failed")
    assert failed["error"] == "UnfitNode"
    assert f"members differ at step {FLIPPED}" in failed["message"]
    assert "admits no newcomer on b, which b-" in failed["message"]

    fourth = job.start("d", steps=4000, slow=0.02)  # on hardware of its own: it joins, and receives the list
    fourth.wait_for("commit", members=3)
    command = ["lighthouse", "quarantine", job.address, "--job", job.name]
    assert run_command(command) == 0
    assert capsys.readouterr().out.startswith("b, which b-")
    assert run_command([*command, "--lift", "z"]) == 2
    assert f"no quarantine of job '{job.name}' names 'z': b" in capsys.readouterr().err
    assert run_command([*command, "--lift", "b"]) == 0
    assert capsys.readouterr().out.startswith("lifted: b, which b-")
    again = job.start("b", steps=4000, slow=0.02)
    again.wait_for("commit", members=4)
    for each in (workers[0], workers[2], fourth, again):
        each.process.kill()
    check_history([*workers, fourth, again])
