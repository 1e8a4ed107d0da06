"""`evermoe role`: promote a replica node to train, or demote a worker to keep copies."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from evermoe.options import check_name, checked
from evermoe.process.memory_folder import DEFAULT, job_folder, replace_text, role_files

PAUSE_SECONDS = 0.05
"""Seconds between two checks for an answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evermoe role`."""
    parser.description = (
        "Ask a process of a running job to take another role. It leaves the job after its step, which repeats no "
        "step, runs its program again with that role, and joins as any newcomer does. Run this command on the machine "
        "of the process, and in its container, as the same user."
    )
    parser.add_argument("role", choices=["train", "replica"], help="train: it computes steps; replica: it keeps copies")
    parser.add_argument("pid", type=int, metavar="PID", help="ID of the process on this machine")
    parser.add_argument("--job", required=True, help="name of the job")
    parser.add_argument("--memory-dir", default=DEFAULT, help="where shared memory lives (%(default)s)")
    parser.add_argument(
        "--limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="seconds to wait for the process, which answers in its next step (%(default)s)",
    )


def main(options: argparse.Namespace) -> int:
    """Ask, and print the answer. Return the exit code.

    Raises:
        ValueError: there is no such process or job here, it keeps its role, or it does not answer in time.
    """
    check_name("--job", options.job)
    limit = checked("--limit", options.limit, float, above=0)
    _ask(job_folder(options.memory_dir, options.job), options, limit)
    print(f"process {options.pid} leaves job {options.job} after its step, and comes back with role {options.role}")
    return 0


def _ask(folder: Path, options: argparse.Namespace, limit: float) -> None:
    if not folder.is_dir():
        raise ValueError(f"no process of job {options.job!r} runs on this machine: expected the folder {folder}")
    request, answer = role_files(folder, options.pid)
    answer.unlink(missing_ok=True)
    replace_text(request, options.role)
    deadline = time.monotonic() + limit
    try:
        while not answer.exists():
            if not Path(f"/proc/{options.pid}").exists():
                raise ValueError(f"there is no process {options.pid} on this machine, or in this container")
            if time.monotonic() > deadline:
                raise ValueError(
                    f"process {options.pid} has not answered within {limit:g} s: expected a member of job "
                    f"{options.job!r} that computes steps, or keeps copies of them"
                )
            time.sleep(PAUSE_SECONDS)
        problem = answer.read_text(encoding="utf-8")
    finally:
        request.unlink(missing_ok=True)
        answer.unlink(missing_ok=True)
    if problem:
        raise ValueError(f"process {options.pid} keeps its role: {problem}")
