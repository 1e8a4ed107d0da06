"""One training script under torchrun, srun's and Kubernetes' variables, and `evermoe run`: with real processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import yaml

import evermoe
from evermoe.comm.lighthouse import start_local_lighthouse
from evermoe.config import environment
from evermoe.config.variables import find_membership
from support import launched
from support.harness import HEARTBEAT_LIMIT, SERVER

LIMIT = 100.0
EXAMPLES = Path(__file__).parents[4] / "examples"
NAMES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "JOB_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
    "GROUP_RANK",
    "JOB_COMPLETION_INDEX",
}
"""Variables of launchers, which no test inherits."""
PREFIXES = ("EVERMOE_", "SLURM_", "TORCHELASTIC_", "TORCHFT_")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """No variable of a launcher is set."""
    for name in os.environ:
        if name in NAMES or name.startswith(PREFIXES):
            monkeypatch.delenv(name)


@pytest.fixture
def start(tmp_path):
    """`start(command, variables)` starts a process in the test's folder; none is left after it."""
    processes = []

    def start(command, variables=None):
        given = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(variables or {})}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        processes.append(subprocess.Popen(command, cwd=tmp_path, env=os.environ | given, text=True, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


@pytest.fixture
def fork(tmp_path):
    """`fork(variables, killed, step)` starts the script in a process that a launcher gives these variables."""
    processes = []

    def fork(variables, killed, step):
        processes.append(SERVER.Process(target=launched.as_task, args=(variables, tmp_path, killed, step), daemon=True))
        processes[-1].start()
        return processes[-1]

    yield fork
    for process in processes:
        process.kill()
        process.join(20)


def exit_code(process):
    process.join(LIMIT)
    return process.exitcode


@pytest.fixture
def lighthouse():
    server, address = start_local_lighthouse(heartbeat_timeout=HEARTBEAT_LIMIT, join_timeout=5)
    yield {"TORCHFT_LIGHTHOUSE": address}
    server.shutdown()


def script(folder, killed="none", step=0):
    return [launched.__file__, str(folder), str(killed), str(step)]


def ended(process):
    """Return its exit code, and what it printed."""
    said, _ = process.communicate(timeout=LIMIT)
    return process.returncode, said


def told(folder):
    """Return what each process that came to the end wrote, by its number."""
    return {int(path.stem): json.loads(path.read_text()) for path in sorted(folder.glob("[0-9]*.json"))}


def losses(results):
    """The loss of each step, which all processes that took it saw."""
    found = {}
    for result in results.values():
        for step, loss in result["losses"].items():
            assert found.setdefault(int(step), loss) == loss
    return found


@pytest.mark.timeout(220)
@pytest.mark.long
def test_torchrun_starts_all_again_and_nothing_is_lost(start, lighthouse, tmp_path, monkeypatch):
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", "3", "--max-restarts", "2"]
    undisturbed, disturbed = tmp_path / "undisturbed", tmp_path / "disturbed"
    for folder in (undisturbed, disturbed):
        folder.mkdir(mode=0o700)
    code, said = ended(start([*command, *script(disturbed, 1, 6)], lighthouse))
    assert code == 0, said
    monkeypatch.setenv("RANK", "0")
    launched.main(undisturbed, "none", 0)
    before, after = told(undisturbed), told(disturbed)
    assert set(after) == {0, 1, 2}
    assert {result["local_rank"] for result in after.values()} == {0, 1, 2}
    for result in after.values():
        assert re.fullmatch(r"torchrun-[0-9a-f-]+", result["job"])
        assert (result["members"], result["step"]) == (3, launched.STEPS)
        assert 6 <= result["first"] <= 8, "resumed from shared memory, at the step that was interrupted or the next"
        assert not any(result["lost"])
    assert len({result["dense"] for result in after.values()}) == 1
    assert max(after[0]["sizes"]) == 3
    for step, loss in losses(after).items():
        assert loss == pytest.approx(losses(before)[step], rel=1e-5)


@pytest.mark.long
@pytest.mark.timeout(220)
def test_workers_of_another_torchrun_continue_when_one_ends(start, lighthouse, tmp_path):
    """Two machines with a torchrun each; without restarts the death of a worker ends its own torchrun alone."""
    names = {"EVERMOE_JOB": f"job-{uuid.uuid4().hex[:8]}", "EVERMOE_MEMBERS": "3"}
    folders = {name: tmp_path / name for name in ("first", "second")}
    machines = {}
    for (name, folder), workers in zip(folders.items(), ("2", "1"), strict=True):
        folder.mkdir(mode=0o700)
        command = [
            *TORCHRUN,
            "--standalone",
            "--nproc-per-node",
            workers,
            *script(folder, 0, 5 if workers == "1" else 99),
        ]
        machines[name] = start(command, {**lighthouse, **names, "EVERMOE_NODE": name})
    code, said = ended(machines["second"])
    assert code != 0, said
    code, said = ended(machines["first"])
    assert code == 0, said
    results = told(folders["first"])
    assert {result["step"] for result in results.values()} == {launched.STEPS}
    assert not any(results[0]["lost"] + results[1]["lost"])
    assert results[0]["sizes"] == [3] * 5 + [2] * 5


@pytest.mark.timeout(220)
def test_tasks_of_srun_are_one_job_that_outlives_one_of_them(fork, lighthouse, tmp_path):
    tmp_path.chmod(0o700)
    tasks = []
    for number in range(3):
        slurm = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_ID": "0"}
        slurm |= {"SLURM_PROCID": str(number), "SLURM_LOCALID": str(number)}
        tasks.append(fork({**lighthouse, **slurm}, "2", 4))
    assert [exit_code(task) for task in tasks] == [0, 0, -9]
    for number, result in told(tmp_path).items():
        assert (result["job"], result["members"], result["local_rank"]) == ("slurm-4711", 3, number)
        assert (result["step"], sum(result["lost"])) == (launched.STEPS, 0)
        assert result["sizes"] == [3] * 4 + [2] * 6


@pytest.mark.timeout(220)
def test_pods_of_the_jobset_are_one_job(fork, lighthouse, tmp_path):
    """The environment that `jobset.yaml` gives its pods, but for their addresses, at real processes."""
    tmp_path.chmod(0o700)
    (jobset,) = yaml.safe_load_all((EXAMPLES / "kubernetes" / "jobset.yaml").read_text())
    jobs = {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}
    workers = jobs["worker"]
    (container,) = workers["template"]["spec"]["containers"]
    fields = {"metadata.labels['jobset.sigs.k8s.io/jobset-name']": str(uuid.uuid4())}
    fields["metadata.labels['topology.kubernetes.io/zone']"] = ""  # as where there is no such label
    pods = []
    for index in range(workers["completions"]):
        fields["spec.nodeName"] = f"machine-{index}"
        variables = {"JOB_COMPLETION_INDEX": str(index)}  # Kubernetes' own
        for each in container["env"]:
            field = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            variables[each["name"]] = (
                fields[field] + str(index) * (field == "spec.nodeName") if field else each["value"]
            )
        assert variables["TORCHFT_LIGHTHOUSE"] == "http://evermoe-lighthouse-0-0.evermoe:29510"
        pods.append(fork({**variables, **lighthouse, "GLOO_SOCKET_IFNAME": "lo"}, "none", 0))
    assert [exit_code(pod) for pod in pods] == [0] * 4
    results = told(tmp_path)
    assert len(results) == workers["completions"]
    assert len({result["job"] for result in results.values()}) == 1
    assert [result["sizes"] for result in results.values()] == [[4] * launched.STEPS] * 4


REPORTS = """
import json, os, pathlib
names = json.dumps({name: value for name, value in os.environ.items()})
pathlib.Path("told-" + os.environ["LOCAL_RANK"]).write_text(names)
"""


@pytest.mark.long
def test_evermoe_run_sets_what_torchrun_sets(start, tmp_path):
    (tmp_path / "reports.py").write_text(REPORTS)
    found = {}
    for launcher in ([*TORCHRUN, "--standalone", "--nproc-per-node"], evermoe_run(tmp_path, "--workers")):
        code, said = ended(start([*launcher, "2", "reports.py"]))
        assert code == 0, said
        found[launcher[2]] = [json.loads((tmp_path / f"told-{number}").read_text()) for number in range(2)]
    own = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "ROLE_NAME"}
    left = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    """torchrun learns of an exception and signals its processes; NCCL may end no member's process."""
    for number in range(2):
        theirs, ours = found["torch.distributed.run"][number], found["evermoe"][number]
        told = {name for name in theirs if name not in os.environ and name not in left}
        assert told >= {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"}
        assert told - {"OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "LC_CTYPE"} <= set(ours)
        same = told - own
        assert {name: ours.get(name) for name in same} == {name: theirs[name] for name in same}
    assert {each["MASTER_PORT"] for each in found["evermoe"]} == {found["evermoe"][0]["MASTER_PORT"]}


@pytest.mark.parametrize(
    "variables", [{"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"}, {"JOB_COMPLETION_INDEX": "0"}]
)
@pytest.mark.few(1)
@pytest.mark.long
def test_evermoe_run_on_several_machines_needs_a_lighthouse(start, tmp_path, variables):
    (tmp_path / "reports.py").write_text(REPORTS)
    code, said = ended(start(evermoe_run(tmp_path, "reports.py"), variables))
    assert code == 2
    assert "each would train a separate job" in said
    code, said = ended(start(evermoe_run(tmp_path, "--members", "1", "reports.py"), variables))
    assert code == 0, said
    code, said = ended(start(evermoe_run(tmp_path, "reports.py"), {"TORCHFT_LIGHTHOUSE": "http://far:1", **variables}))
    assert code == 0, said
    told = json.loads((tmp_path / "told-0").read_text())
    assert (told["EVERMOE_LIGHTHOUSE"], told["MASTER_ADDR"]) == ("http://far:1", "far")
    assert told["RANK"] == variables.get("SLURM_PROCID", "0")


def evermoe_run(folder, *arguments):
    return [sys.executable, "-m", "evermoe", "run", "--memory-dir", str(folder), *arguments]


@pytest.mark.long
def test_arguments_of_transformers_start_under_evermoe_run(start, tmp_path):
    pytest.importorskip("accelerate")
    tmp_path.chmod(0o700)
    (tmp_path / "trainer.py").write_text(
        "from transformers import TrainingArguments\n"
        "arguments = TrainingArguments('out', use_cpu=True)\n"
        "told = f'world {arguments.world_size} rank {arguments.process_index}'\n"
        "open(f'told-{arguments.process_index}', 'w').write(told)\n"
    )
    code, said = ended(start(evermoe_run(tmp_path, "--workers", "2", "trainer.py")))
    assert code == 0, said
    assert [(tmp_path / f"told-{number}").read_text() for number in range(2)] == ["world 2 rank 0", "world 2 rank 1"]


@pytest.mark.parametrize(
    ("given", "index", "expected"),
    [
        ({"node_rank": 1, "nodes": None, "members": 6}, 1, {"RANK": "3", "WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "3"}),
        ({"node_rank": 0, "nodes": 1, "members": 3}, 0, {"RANK": "0", "WORLD_SIZE": "3", "ROLE_WORLD_SIZE": "3"}),
        (
            {"node_rank": 0, "nodes": 1, "members": 2, "roles": ("train", "train", "replica")},
            2,
            {"RANK": "2", "WORLD_SIZE": "3", "ROLE_NAME": "replica", "ROLE_RANK": "0", "ROLE_WORLD_SIZE": "1"},
        ),
        ({"node_rank": None, "nodes": None, "members": 6}, 1, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}),
    ],
)
def test_ranks_count_all_processes_of_all_machines_as_far_as_they_are_known(given, index, expected):
    common = {"job": "x", "roles": ("train", "train"), "master": ("host", "1"), "restarts": 3}
    found = environment.TorchrunVariables(**common | given).of(index, 2)
    assert found | expected == found
    assert ("RANK" in found) == (given["node_rank"] is not None)
    assert found.get("TORCHELASTIC_RESTART_COUNT") in (None, "2")


@pytest.mark.parametrize(
    ("variables", "job", "members"),
    [
        ({"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "big", "LOCAL_RANK": "3"}, "torchrun-big", 4),
        ({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "2"}, "slurm-12", 2),
        ({"SLURM_JOB_ID": "12", "SLURM_NTASKS": "8", "TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2"}, "slurm-12", 2),
        ({"JOB_ID": "a", "SLURM_JOB_ID": "12", "TORCHELASTIC_RUN_ID": "b"}, "a", None),
        ({"EVERMOE_JOB": "z", "JOB_ID": "a", "EVERMOE_MEMBERS": "3", "WORLD_SIZE": "2"}, "z", 3),
        ({"EVERMOE_LIGHTHOUSE": "http://b:1", "JOB_ID": "a"}, "a", None),
    ],
)
def test_variables_of_launchers_count_where_ours_say_nothing(monkeypatch, variables, job, members):
    for name, value in ({"TORCHFT_LIGHTHOUSE": "http://a:1"} | variables).items():
        monkeypatch.setenv(name, value)
    config = find_membership(evermoe.Membership())
    assert (config.job, config.members) == (job, members)
    assert config.lighthouse == variables.get("EVERMOE_LIGHTHOUSE", "http://a:1")
    assert find_membership(evermoe.Membership(job="own", members=7, lighthouse="http://c:1")).members == 7


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, as torchrun sets it, but no Lighthouse is named"),
        ({"SLURM_NTASKS": "3", "SLURM_JOB_ID": "1"}, "SLURM_NTASKS is 3, as srun sets it, but no Lighthouse"),
        ({"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS is 4, as srun sets it, but no Light"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX is 0, as Kubernetes sets it in an Indexed Job, but no"),
        ({"WORLD_SIZE": "two"}, "expected WORLD_SIZE to be a whole number, >= 1, got 'two'"),
        ({"TORCHFT_LIGHTHOUSE": "http://a:1", "JOB_ID": "../x"}, "expected JOB_ID, in place of which EVERMOE_JOB may"),
        ({"TORCHFT_LIGHTHOUSE": "http://a:1", "TORCHELASTIC_RUN_ID": "none"}, "must name the job.*--rdzv-id"),
    ],
)
def test_several_processes_that_would_not_find_each_other_are_refused(monkeypatch, variables, words):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        find_membership(evermoe.Membership())


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1"}, {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "1"}])
def test_one_process_alone_is_a_job_without_a_name(monkeypatch, variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = find_membership(evermoe.Membership())
    assert (config.lighthouse, config.job, config.members) == (None, None, None)


def test_processes_that_are_jobs_of_their_own_say_so(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    monkeypatch.setenv("EVERMOE_MEMBERS", "1")
    assert find_membership(evermoe.Membership()).lighthouse is None


@pytest.mark.parametrize("path", sorted((EXAMPLES / "slurm").glob("*.sbatch")), ids=lambda path: path.stem)
def test_batch_scripts_are_valid_shell(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("path", sorted((EXAMPLES / "kubernetes").glob("*.yaml")), ids=lambda path: path.stem)
def test_manifests_name_their_kinds(path):
    for manifest in yaml.safe_load_all(path.read_text()):
        assert manifest["kind"] in {"Deployment", "Service", "Job", "NetworkPolicy", "JobSet"}
        assert manifest["apiVersion"] and manifest["metadata"]["name"]
