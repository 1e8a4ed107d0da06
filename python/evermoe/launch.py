"""Processes of a job on this machine: used by `evermoe run` and the demo."""

from __future__ import annotations

import fcntl
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from evermoe.config.environment import MASTER_PORT, TorchrunVariables, free_port
from evermoe.errors import LEFT_CODE, REQUEUE_CODE
from evermoe.options import check_name, count
from evermoe.process.memory_folder import BEGUN, DEFAULT, FINISHED, job_folder, make_private, node_name, open_lock

STOP_SECONDS = 35.0
"""Seconds between SIGTERM and SIGKILL for workers: longer than their `drain_timeout`, in which they leave the job."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals at which `evermoe run` makes its workers leave. A closing terminal sends SIGHUP."""

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that `evermoe run` forwards to its workers: schedulers send them before a time limit."""

KILLED_CODE = 128 + signal.SIGKILL
"""Exit code of `evermoe run` after it has killed a stopped worker of a finished job."""

STOPPED_SECONDS = 30.0
"""Seconds until a stopped worker (SIGSTOP) is killed, once the job is finished and all others have ended."""


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
        command: command of each worker, e.g. `[sys.executable, "train.py"]`.
        name: name of the job, and of its shared memory.
        members: number of members that a new job waits for, over all machines.
        lighthouse: address of a running Lighthouse; None starts one in this process, for this machine alone.
        memory_dir: directory of named shared memory.
        hang_timeout: seconds to wait for a silent member.
        heartbeat_timeout: seconds without a heartbeat after which a member counts as dead.
        environment: added to every worker's environment.
    """

    command: Sequence[str]
    name: str
    members: int
    lighthouse: str | None = None
    memory_dir: str = DEFAULT
    hang_timeout: float = 30.0
    heartbeat_timeout: float = 0.35
    environment: Mapping[str, str] = field(default_factory=dict)
    workers: list[Worker] = field(default_factory=list)
    _server: Any = None
    _hosted: Any = None
    _lock: Any = None

    def __enter__(self) -> LocalJob:
        check_name("--job", self.name)
        try:
            make_private(self.memory)
            self._lock = open_lock(self.memory / "lock")
        except OSError as error:
            raise ValueError(f"memory_dir {self.memory_dir}: cannot create the job's folder in it: {error}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"job {self.name!r} is already running on this machine (it holds {self.memory}): choose another --job, "
                f"or add a worker to it: {self._lock.read() or 'its evermoe run will print how'}"
            ) from None
        if self.lighthouse is None:
            from evermoe.comm.lighthouse import start_local_lighthouse

            self._server, self.lighthouse = start_local_lighthouse(
                heartbeat_timeout=self.heartbeat_timeout, join_timeout=self.hang_timeout
            )
        for mark in (BEGUN, FINISHED):
            (self.memory / mark).unlink(missing_ok=True)
        self._lock.truncate(0)
        self._lock.write(self.join_command())
        self._lock.flush()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()
        for server in (self._server, self._hosted):
            if server is not None:
                server.shutdown()

    def remove_memory(self) -> None:
        """Remove the job's shared memory on this machine."""
        shutil.rmtree(self.memory, ignore_errors=True)

    @property
    def memory(self) -> Path:
        """Shared memory of the job on this machine: a folder for each node."""
        return job_folder(self.memory_dir, self.name)

    def is_marked(self, mark: str) -> bool:
        """Return whether a worker of this machine has marked the job as begun, or as finished."""
        return (self.memory / mark).exists()

    def host_lighthouse(self) -> None:
        """Start the Lighthouse of the job that is on this machine, unless it is running.

        Raises:
            ValueError: none of the addresses is this machine's.
        """
        from evermoe.comm.lighthouse import own_address, start_lighthouse

        bind = own_address(str(self.lighthouse))
        if bind is not None:
            heartbeat, hang = self.heartbeat_timeout, self.hang_timeout
            self._hosted = start_lighthouse(heartbeat_timeout=heartbeat, join_timeout=hang, bind=bind)

    @property
    def has_own_lighthouse(self) -> bool:
        """Whether the job's Lighthouse runs in this process, so that the job has no other machines."""
        return self._server is not None

    def join_command(self) -> str:
        """Command that adds a worker to this job, for a shell of this machine."""
        variables = {"LIGHTHOUSE": str(self.lighthouse), "JOB": self.name, "MEMBERS": str(self.members)}
        if self.memory_dir != DEFAULT:
            variables["MEMORY_DIR"] = self.memory_dir
        settings = [f"EVERMOE_{name}={shlex.quote(value)}" for name, value in variables.items()]
        program = ["python" if part == sys.executable else part for part in self.command]
        return " ".join([*settings, shlex.join(program)])

    def start(
        self,
        index: int,
        node: str,
        *arguments: str,
        role: str = "train",
        variables: Mapping[str, str] = MappingProxyType({}),
        **options: Any,
    ) -> Worker:
        """Start worker `index` on `node`. A `replica` only keeps copies; a `spare` waits to replace a lost worker.

        Args:
            index: number of the worker on this machine.
            node: the machine whose memory is lost as one.
            arguments: additional arguments of the command.
            role: `train`, `replica` or `spare`.
            variables: additional environment variables.
            options: options of `subprocess.Popen`.
        """
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
            "EVERMOE_BEGUN": str(self.memory / BEGUN),
            "EVERMOE_FINISHED": str(self.memory / FINISHED),
            "LOCAL_RANK": str(index),
            **variables,
        }
        if self._server is not None and sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        options.setdefault("start_new_session", True)  # Ctrl-C in a terminal reaches only this process
        process = subprocess.Popen([*self.command, *arguments], env=environment, text=True, **options)
        worker = Worker(index, node, process, role)
        self.workers.append(worker)
        return worker

    def stop(self) -> None:
        """End all workers: SIGTERM, then SIGKILL for those that do not end."""
        running = [worker for worker in self.workers if worker.process.poll() is None]
        deadline = time.monotonic() + STOP_SECONDS
        try:
            terminate(running)
            for worker in running:
                with suppress(subprocess.TimeoutExpired):
                    worker.process.wait(max(0.1, deadline - time.monotonic()))
        finally:  # also at a second Ctrl-C
            for worker in running:
                worker.process.kill()
                worker.process.wait()


def terminate(workers: Sequence[Worker]) -> None:
    """Ask workers to leave the job, stopped ones included."""
    for worker in workers:
        worker.process.terminate()
        worker.process.send_signal(signal.SIGCONT)


def run(
    job: LocalJob, workers: int, restarts: int, replicas: int = 0, spares: int = 0, node_rank: int | None = None
) -> int:
    """Run `workers` that train, `replicas` that keep copies for them, and `spares`, until they end.

    A crashed worker is restarted on the same node. If there are spares, one of them replaces it, and it restarts as a
    spare. SIGINT, SIGTERM and SIGHUP make all workers leave the job. SIGUSR1 and SIGUSR2 are forwarded to them.
    `node_rank` is the number of this machine, for torchrun's variables.

    Returns an exit code: 0 if at least one worker finished and none failed for good.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, len(os.sched_getaffinity(0)) // max(workers + replicas, spares))
        job.environment = {"OMP_NUM_THREADS": str(threads), **job.environment}
    return _Run(job, restarts, node_rank).run_workers(["train"] * workers + ["replica"] * replicas + ["spare"] * spares)


class _Run:
    """One execution of `evermoe run`.

    Args:
        job: the job, whose context is not entered yet.
        restarts: how often each worker is restarted.
        node_rank: number of this machine, if the job has several and it is known.
    """

    def __init__(self, job: LocalJob, restarts: int, node_rank: int | None) -> None:
        self._job, self._restarts, self._node_rank = job, restarts, node_rank
        self._variables: TorchrunVariables
        self._node = node_name(os.environ.get("EVERMOE_NODE") or None)
        self._running: list[Worker] = []
        self._has_spares = False
        self._codes: list[int] = []
        """Exit codes of workers that are not restarted."""
        self._signals: list[int] = []
        """Received signals of `STOP_SIGNALS`."""
        self._notices: list[int] = []
        """Received signals of `NOTICES`."""
        self._forwarded = 0
        """Number of notices that were forwarded to the workers."""
        self._stopped_since = math.inf
        """Time since which only stopped workers of a finished job remain."""
        self._has_killed_stopped = False
        self._stop_code: int | None = None
        """Exit code once this command stops the workers; None before."""
        self._deadline = math.inf

    def run_workers(self, roles: Sequence[str]) -> int:
        """Start a worker for each role, and wait for all of them. Return the exit code."""
        with _listening(STOP_SIGNALS, self._signals), _listening(NOTICES, self._notices), self._job as job:
            _say(f"job {job.name}, Lighthouse {job.lighthouse}; to add a worker: {job.join_command()}")
            self._variables, self._has_spares = self._torchrun_variables(roles), "spare" in roles
            self._running = [self._start(index, role) for index, role in enumerate(roles)]
            while self._running:
                time.sleep(0.1)
                self._obey()
                self._end_stopped()
                for worker in [worker for worker in self._running if worker.process.poll() is not None]:
                    self._handle_end(worker)
        return self._end(len(roles))

    def _torchrun_variables(self, roles: Sequence[str]) -> TorchrunVariables:
        job, number = self._job, self._node_rank
        nodes: int | None = None
        if job.has_own_lighthouse:
            number, nodes, master = 0, 1, ("127.0.0.1", str(free_port()))
        else:  # the machine of rank 0 is unknown: in most jobs it is that of the first Lighthouse
            host = urlsplit(str(job.lighthouse).split(",")[0]).hostname or ""
            master = os.environ.get("MASTER_ADDR") or host, os.environ.get("MASTER_PORT") or MASTER_PORT
        return TorchrunVariables(job.name, job.members, tuple(roles), number, nodes, master, self._restarts)

    def _start(self, index: int, role: str, restart: int = 0) -> Worker:
        return self._job.start(index, self._node, role=role, variables=self._variables.of(index, restart))

    def _obey(self) -> None:
        for number in self._notices[self._forwarded :]:
            _say(
                f"{signal.Signals(number).name}: forwarded to the workers, which complete their step and leave the job"
            )
            for worker in self._running:
                worker.process.send_signal(number)
            self._forwarded += 1
        if self._signals and self._stop_code is None:
            name = signal.Signals(self._signals[0]).name
            _say(f"{name}: the workers complete their step and leave the job; a second one kills them")
            self._stop(128 + self._signals[0])
        elif len(self._signals) > 1 or time.monotonic() > self._deadline:
            for worker in self._running:
                worker.process.kill()

    def _end_stopped(self) -> None:
        """Kill workers that stay stopped (SIGSTOP) long after their job is finished: nothing else would end them."""
        if not self._job.is_marked(FINISHED) or not all(_is_stopped(each.process.pid) for each in self._running):
            self._stopped_since = math.inf
            return
        self._stopped_since = min(self._stopped_since, time.monotonic())
        if time.monotonic() > self._stopped_since + STOPPED_SECONDS:
            for worker in self._running:
                _say(
                    f"worker {worker.index} (pid {worker.process.pid}) is stopped, and the job was finished "
                    f"{STOPPED_SECONDS:g} s ago: killing it"
                )
                worker.process.kill()
                worker.process.wait()
            self._has_killed_stopped = True

    def _stop(self, code: int) -> None:
        self._stop_code = code
        self._deadline = time.monotonic() + STOP_SECONDS
        terminate(self._running)

    def _handle_end(self, worker: Worker) -> None:
        """Note that a worker has ended, and restart it if it may be."""
        self._running.remove(worker)
        code = worker.process.returncode
        if self._notices and -code in NOTICES:
            code = REQUEUE_CODE  # the worker had no handler yet
        if code == 0 or self._stop_code is not None or self._has_killed_stopped:
            self._codes.append(code)
            return
        starts_again = worker.restarts < self._restarts and code != REQUEUE_CODE
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        _say(f"worker {worker.index} (pid {worker.process.pid}) {how}{'; restarting it' * starts_again}")
        if starts_again:
            role = "spare" if self._has_spares and worker.role == "train" else worker.role
            again = self._start(worker.index, role, worker.restarts + 1)
            again.restarts = worker.restarts + 1
            self._running.append(again)
            return
        self._codes.append(code)
        left = sum(each.role != "replica" for each in self._running)
        job = self._job
        if job.has_own_lighthouse and not job.is_marked(BEGUN) and left < job.members and self._running:
            _say(f"the job cannot begin with {count(left, 'worker')} of {job.members}: stopping what is left")
            self._stop(code if code > 0 else 128 - code)

    def _end(self, total: int) -> int:
        """Print the outcome of the job, and remove its memory if it is over. Return the exit code."""
        job, code = self._job, self._stop_code
        is_finished = job.is_marked(FINISHED)
        lost = [each for each in self._codes if each < 0 or each in (LEFT_CODE, REQUEUE_CODE)]
        failed = [each for each in self._codes if each > 0 and each not in (LEFT_CODE, REQUEUE_CODE)]
        if lost and code is None:
            _say(f"{len(lost)} of {total} processes were killed or left after a signal")
        has_finished = not failed and 0 in self._codes
        if code is None or (is_finished and has_finished):
            code = failed[0] if failed else 0 if has_finished else REQUEUE_CODE if REQUEUE_CODE in self._codes else 1
            code = KILLED_CODE if self._has_killed_stopped and not failed else code
        if (is_finished and has_finished) or not any(job.memory.glob("*/*.arena")):
            if self._signals and not is_finished:
                _say("stopped; nothing is left in shared memory: the same command resumes from a checkpoint, if any")
            job.remove_memory()
        elif job.is_marked(BEGUN) or self._signals:
            _say(f"stopped before the last step; the same command resumes job {job.name} from {job.memory}")
        else:
            _say(f"the job has not begun; memory of earlier runs of job {job.name} stays in {job.memory}")
        return code


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (OSError, IndexError):  # the process has ended
        return False


@contextmanager
def _listening(expected: Sequence[signal.Signals], signals: list[int]) -> Iterator[None]:
    """Record the expected signals, except those that this process was started to ignore."""
    numbers = [each for each in expected if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, lambda number, frame: signals.append(number)) for each in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)


def _say(message: str) -> None:
    with suppress(OSError):  # the terminal may be closed
        print(f"evermoe run: {message}", file=sys.stderr, flush=True)
