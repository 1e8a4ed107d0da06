"""Starts the processes of a job on this machine: what `evermoe run` and the demo use."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evermoe.errors import LEFT_CODE
from evermoe.memory_folder import DEFAULT, job_folder, make_private, node_name, open_lock
from evermoe.options import check_name

STOP_SECONDS = 35.0
"""Time that workers get between SIGTERM and SIGKILL: longer than their `leave_limit`, in which they leave the job."""


@dataclass
class Worker:
    """One process of the job on this machine."""

    index: int
    node: str
    process: subprocess.Popen[str]
    role: str = "train"
    restarts: int = 0


@dataclass
class LocalJob:
    """A Lighthouse (its own, unless `lighthouse` names one) and the workers that use it.

    Args:
        command: what each worker runs, e.g. `[sys.executable, "train.py"]`.
        name: of the job; names its shared memory.
        members: that a new job waits for, over all machines.
        lighthouse: address of a running Lighthouse; None starts one in this process, for this machine alone.
        memory_dir: directory of named shared memory.
        hang_limit: seconds that a silent member is waited for.
        heartbeat_limit: seconds without a heartbeat after which a member counts as dead.
        environment: added to every worker's environment.
    """

    command: Sequence[str]
    name: str
    members: int
    lighthouse: str | None = None
    memory_dir: str = DEFAULT
    hang_limit: float = 30.0
    heartbeat_limit: float = 0.4
    environment: Mapping[str, str] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    _server: Any = None
    _lock: Any = None

    def __enter__(self) -> LocalJob:
        check_name("--job", self.name)
        try:
            make_private(self.memory)
            self._lock = open_lock(self.memory / "lock")
        except OSError as error:
            raise ValueError(f"memory_dir {self.memory_dir}: the job's folder cannot be made there: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"job {self.name!r} is already running on this machine (it holds {self.memory}): choose another --job"
            ) from None
        if self.lighthouse is None:
            from evermoe.comm.lighthouse import start_local_lighthouse

            self._server, self.lighthouse = start_local_lighthouse(
                heartbeat_limit=self.heartbeat_limit, join_limit=self.hang_limit
            )
        (self.memory / "finished").unlink(missing_ok=True)
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        if self._server is not None:
            self._server.shutdown()

    def forget(self) -> None:
        """Removes the job's shared memory on this machine."""
        shutil.rmtree(self.memory, ignore_errors=True)

    @property
    def memory(self) -> Path:
        """The job's shared memory on this machine: a folder for each node."""
        return job_folder(self.memory_dir, self.name)

    def start(self, index: int, node: str, *arguments: str, role: str = "train", **options: Any) -> Worker:
        """Starts worker `index` on `node`; `options` go to `subprocess.Popen`. As a `replica` it keeps copies alone."""
        check_name("node", node)
        environment = {
            **os.environ,
            **self.environment,
            "EVERMOE_LIGHTHOUSE": str(self.lighthouse),
            "EVERMOE_JOB": self.name,
            "EVERMOE_NODE": node,
            "EVERMOE_ROLE": role,
            "EVERMOE_MEMBERS": str(self.members),
            "EVERMOE_MEMORY_DIR": self.memory_dir,
            "EVERMOE_FINISHED": str(self.memory / "finished"),
            "LOCAL_RANK": str(index),
        }
        if self._server is not None and sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        process = subprocess.Popen([*self.command, *arguments], env=environment, text=True, **options)
        worker = Worker(index, node, process, role)
        self.workers.append(worker)
        return worker

    def stop(self) -> None:
        """Ends all workers: SIGTERM, then SIGKILL for those that do not listen."""
        running = [worker.process for worker in self.workers if worker.process.poll() is None]
        for process in running:
            process.terminate()
            process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + STOP_SECONDS
        for process in running:
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run(job: LocalJob, workers: int, restarts: int, replicas: int = 0) -> int:
    """Runs `workers` processes that train, and `replicas` that keep copies for them, until they end.

    One killed by a crash is restarted on the same node.

    Returns an exit code: 0 if at least one worker finished and none failed for good.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the workers are stopped, too
    node = node_name(os.environ.get("EVERMOE_NODE") or None)
    codes: list[int] = []
    with job:
        roles = ["train"] * workers + ["replica"] * replicas
        running = [job.start(index, node, role=role) for index, role in enumerate(roles)]
        while running:
            time.sleep(0.1)
            for worker in [worker for worker in running if worker.process.poll() is not None]:
                running.remove(worker)
                code = worker.process.returncode
                if code != 0 and worker.restarts < restarts:
                    print(
                        f"evermoe run: worker {worker.index} ended with {code}; starting it again",
                        file=sys.stderr,
                    )
                    again = job.start(worker.index, node, role=worker.role)
                    again.restarts = worker.restarts + 1
                    running.append(again)
                else:
                    codes.append(code)
    lost = [code for code in codes if code < 0 or code == LEFT_CODE]
    failed = [code for code in codes if code > 0 and code != LEFT_CODE]
    if lost:
        total = workers + replicas
        print(f"evermoe run: {len(lost)} of {total} processes were killed, or left on SIGTERM", file=sys.stderr)
    if not failed and 0 in codes:
        job.forget()
        return 0
    if not any(job.memory.glob("*/*.arena")):
        job.forget()
    else:
        print(f"evermoe run: started again with --job {job.name}, the job resumes from {job.memory}", file=sys.stderr)
    return failed[0] if failed else 1
