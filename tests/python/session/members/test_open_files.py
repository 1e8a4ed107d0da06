"""Workers that may open few files: gloo would end them without a word of why."""

from __future__ import annotations

import resource

import pytest

from support import worker
from support.harness import Worker
from support.history import check_history
from support.worker import Fault, Options

FEW = 48
"""Files that a process may have open: too few for any job."""


class Frugal(Worker):
    """A worker that may open few files at first; `NOFILE` is its hard limit."""

    @staticmethod
    def main(options: Options) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (FEW, int(options.environment["NOFILE"])))
        worker.main(options)


def test_too_few_open_files_are_an_error_that_says_how_many_are_needed(start_job):
    job = start_job(3)
    refused = job.start("a", kind=Frugal, environment={"NOFILE": str(FEW)})
    assert refused.join() == 1
    (failed,) = refused.events("failed")
    assert failed["error"] == "TooFewFiles"
    assert f"this process may open {FEW} files, and a job of 3 members needs " in failed["message"]


@pytest.mark.parametrize("dense", ["sharded", "replicated"])
def test_a_limit_that_may_be_raised_is_raised_by_as_much_as_the_members_need(start_job, dense):
    """Also for a recovery: no process opens more than it has raised its limit to."""
    job = start_job(4, shard_optimizer=dense == "sharded")
    a, b, c, d = (
        job.start(name, *faults, kind=Frugal, environment={"NOFILE": "4096"})
        for name, faults in {"a": [], "b": [], "c": [Fault("vote", 5)], "d": []}.items()
    )
    assert [each.join() for each in (a, b, c, d)] == [0, 0, -9, 0]
    check_history(job.workers)
