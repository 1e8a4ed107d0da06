"""Fixtures that several test files use."""

import contextlib
import os

import pytest
import torch

from support import fast_set
from support.kernels import fast_kernels, fast_library, kernels, library
from support.server_fixtures import azure, behind, own_azure, own_server, proxy, s3, server, shared_s3

__all__ = [
    "azure",
    "behind",
    "fast_kernels",
    "fast_library",
    "kernels",
    "library",
    "own_azure",
    "own_server",
    "proxy",
    "s3",
    "server",
    "shared_s3",
    "start",
    "start_job",
]


# Threads of small loops wait for each other by spinning: on a busy machine they take ten times as long as one. Tests
# of several threads set their number.
torch.set_num_threads(1)

# Tests that lay networks make interfaces that come and go. UCX would offer one to its peers and then not find it.
os.environ.setdefault("UCX_NET_DEVICES", "lo")


JOBS = pytest.StashKey[list]()
"""The jobs that a test has started."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    fast_set.mark(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A failed test shows what its workers have printed, and their last events."""
    report = yield
    if report.when == "call" and report.failed:
        for job in item.stash.get(JOBS, []):
            for each in job.workers:
                last = "\n".join(str(event)[:500] for event in each.events()[-5:])
                report.sections.append((f"worker {each.name}", f"{each.log()}\n{last}"))
    return report


@pytest.fixture
def start_job(request, tmp_path):
    """`start_job(members, **session_options)` makes a job; its processes and memory end with the test."""
    from support.harness import Job

    with contextlib.ExitStack() as stack:

        def start(members=3, lighthouse=None, **session):
            folder = tmp_path / f"job{len(list(tmp_path.glob('job*')))}"
            folder.mkdir()
            job = Job(folder, members, lighthouse, **session)
            stack.callback(job.close)
            request.node.stash.setdefault(JOBS, []).append(job)
            return job

        yield start


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Each device that the ops run on."""
    from evermoe.ops.cache import has_cuda_kernels

    if request.param == "cuda" and not (torch.cuda.is_available() and has_cuda_kernels()):
        pytest.skip("no CUDA device, or no kernels in this build")
    return request.param


@pytest.fixture
def cuda():
    """The CUDA device, for tests marked `gpu`."""
    from evermoe.ops.cache import has_cuda_kernels

    if not (torch.cuda.is_available() and has_cuda_kernels()):
        pytest.skip("no CUDA device, or no kernels in this build")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def own_gpus(cuda):
    """`own_gpus(number)`: the environment of a process that sees one GPU alone, another one for each number."""
    from support import stand_in

    if torch.cuda.device_count() < 4 and stand_in.DRIVER is None:
        pytest.skip("needs four GPUs")
    return lambda number: {"CUDA_VISIBLE_DEVICES": str(number)}


@pytest.fixture
def stands_in(cuda):
    """For what no GPU does when it is asked to: the stand-ins of driver, runtime and NCCL must be at work."""
    from support import stand_in

    if stand_in.DRIVER is None:
        pytest.skip("needs the stand-in of NCCL")


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 1 MiB."""
    from support import disks

    if not disks.may_mount():
        pytest.skip("this process may not mount file systems")
    with disks.small_disk(tmp_path / "disk", 1) as folder:
        yield folder


@pytest.fixture
def dying_disk(tmp_path):
    """A disk of 64 MiB, which can be stopped."""
    from support import disks

    if not disks.may_mount():
        pytest.skip("this process may not mount file systems")
    with contextlib.ExitStack() as stack:
        try:
            folder = stack.enter_context(disks.dying_disk(tmp_path / "disk", 64))
        except OSError as error:
            pytest.skip(str(error))
        yield folder


@pytest.fixture
def start(start_job, tmp_path):
    """`start(script, names, *arguments)` runs `script(write, *arguments, node, options)`; what each has written."""
    from evermoe.process.reports import EventFile
    from support.habits import run
    from support.harness import PATIENCE, SERVER

    processes = []

    def begin(script, names, *arguments, **session):
        job = start_job(len(names.replace("r", "")), **session)
        options = job.session | {"lighthouse": job.address}
        for name in names:
            process = SERVER.Process(target=run, args=(script, str(tmp_path), name, *arguments, name, options))
            process.start()
            processes.append(process)
        for process in processes:
            process.join(PATIENCE)
        found = {name: EventFile(tmp_path / f"{name}.jsonl").read() for name in names}
        return found, {name: (tmp_path / f"{name}.log").read_text() for name in names}

    yield begin
    for process in processes:
        process.kill()
        process.join()
