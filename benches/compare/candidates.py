"""Candidates of a comparison: how their workers are started, and which services run with them."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benches.compare import processes
from evermoe.demo.flags import worker_arguments
from evermoe.launch import LocalJob
from evermoe.planning.presets import PRESET_NAMES, PRESETS, PresetName
from evermoe.process.reports import Reports

KINDS = ("ready", "begin", "taken", "resumed", "recovered", "final", "killed", "joining", "idle")
"""Events that show the progress of a run; a session reports many more."""


class Launch:
    """Launches the workers of a candidate in one run.

    Args:
        options: options of `python -m benches.compare`.
        folder: folder of this run.
    """

    worker_module = ""
    takes_joins = True
    """Whether new workers can join."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder = options, folder
        self.reports = Reports(folder, KINDS)
        self.running: dict[int, subprocess.Popen[Any]] = {}
        self._resources = ExitStack()

    def __enter__(self) -> Launch:
        self.open()
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self.running.values():
            processes.kill(process.pid)
            process.wait()
        self._resources.close()

    def open(self) -> None:
        """Start the services of the candidate."""

    def start(self, worker: int, *extra: str) -> None:
        """Start a worker on its own node."""
        flags = [*self.arguments(worker), "--events", str(self.reports.add(worker)), *extra]
        with self.reports.log(worker).open("w") as log:
            self.running[worker] = self._spawn(worker, flags, log)

    def kill(self, worker: int) -> None:
        """SIGKILL a worker and the process that started it: its node is lost."""
        processes.kill(self.running[worker].pid)
        self.running[worker].wait()

    def changed(self) -> None:
        """Notify the candidate that workers were started, were killed or died."""

    def started(self) -> list[int]:
        """Return the live workers that have reported something."""
        alive = [worker for worker, process in sorted(self.running.items()) if process.poll() is None]
        return [worker for worker in alive if self.reports.events[worker]]

    def arguments(self, worker: int) -> list[str]:
        """Return the flags of a worker."""
        options = self.options
        return [
            *worker_arguments(self.settings(), options.steps, options.replication, self.folder),
            *("--held-out", str(options.held_out), "--expert-parallel", str(options.expert_parallel)),
            *("--worker", str(worker)),
        ]

    def settings(self) -> argparse.Namespace:
        """Return the options of the run for this candidate, with its own folder of checkpoints."""
        return argparse.Namespace(**vars(self.options) | {"checkpoints": str(self.folder / "checkpoints")})

    def command(self, worker: int) -> list[str]:
        """Return the command of a worker's process, without its flags."""
        return [sys.executable, "-m", self.worker_module]

    def variables(self) -> Mapping[str, str]:
        """Return the environment variables of the workers."""
        return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "GLOO_SOCKET_IFNAME": "lo"}

    def _spawn(
        self, worker: int, arguments: list[str], log: Any, variables: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[Any]:
        return subprocess.Popen(
            [*self.command(worker), *arguments],
            env={**os.environ, **self.variables(), **variables},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class PresetLaunch(Launch):
    """Launches the workers of an evermoe session."""

    def __init__(self, options: argparse.Namespace, folder: Path, preset: PresetName) -> None:
        super().__init__(options, folder)
        self._preset = preset
        self._job = LocalJob(
            [sys.executable, "-m", "benches.compare.session_worker"],
            f"compare-{uuid.uuid4().hex[:8]}",
            options.workers,
            memory_dir=options.memory_dir,
            hang_timeout=options.hang_timeout,
            environment=self.variables(),
        )

    def open(self) -> None:
        """Start a Lighthouse."""
        self._resources.callback(self._job.remove_memory)
        self._resources.enter_context(self._job)

    def kill(self, worker: int) -> None:
        """SIGKILL a worker, and remove its node's memory."""
        super().kill(worker)
        shutil.rmtree(self._job.memory / node(worker), ignore_errors=True)

    def settings(self) -> argparse.Namespace:
        """Return the options with the preset and the interval of its checkpoints."""
        given = {"preset": self._preset, "checkpoint_interval": self.options.ft_checkpoint_interval}
        return argparse.Namespace(**vars(super().settings()) | given)

    def _spawn(
        self, worker: int, arguments: list[str], log: Any, variables: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[Any]:
        return self._job.start(
            worker, node(worker), *arguments, variables=variables, stdout=log, stderr=subprocess.STDOUT
        ).process


class RestartLaunch(Launch):
    """Launches torchrun with an agent per node; if a worker dies, all restart from a checkpoint."""

    worker_module = "benches.compare.restart_worker"

    def open(self) -> None:
        """Start the store in which the agents meet; no node's death ends it."""
        self.store = start_store()

    def command(self, worker: int) -> list[str]:
        """Return the command of an elastic agent and its worker."""
        options = self.options
        most = options.workers + options.joins
        meeting = {"is_host": 0, "last_call_timeout": 1, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
        agent = {
            "nnodes": f"{options.expert_parallel}:{most}",
            "nproc-per-node": 1,
            "max-restarts": 1000,
            "rdzv-backend": "c10d",
            "rdzv-endpoint": f"127.0.0.1:{self.store.port}",
            "rdzv-id": "compare",
            "rdzv-conf": ",".join(f"{key}={value}" for key, value in meeting.items()),
            "local-addr": "127.0.0.1",
        }
        flags = [f"--{key}={value}" for key, value in agent.items()]
        return [sys.executable, "-m", "torch.distributed.run", *flags, "-m", self.worker_module]

    def variables(self) -> Mapping[str, str]:
        """Return variables that disable the agents' shared store, which would die with the agent of rank 0 and end
        the job."""
        return {**super().variables(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


class FixedGroupsLaunch(Launch):
    """Launches workers in fixed expert-parallel groups; a controller notifies them who is alive."""

    worker_module = "benches.compare.fixed_groups_worker"

    def open(self) -> None:
        """Start the controller's store."""
        self.store = start_store()
        self._epoch, self._told = 0, list[int]()

    def settings(self) -> argparse.Namespace:
        """Return the options with the interval of its checkpoints."""
        given = {"checkpoint_interval": self.options.ft_checkpoint_interval}
        return argparse.Namespace(**vars(super().settings()) | given)

    def arguments(self, worker: int) -> list[str]:
        """Return the flags with the controller's address."""
        return [*super().arguments(worker), "--store", f"127.0.0.1:{self.store.port}"]

    def changed(self) -> None:
        """Begin an epoch if the set of live workers has changed and all of them have started."""
        ready = self.started()
        is_first = not self._epoch
        if ready and ready != self._told and (not is_first or len(ready) == self.options.workers):
            self._epoch, self._told = self._epoch + 1, ready
            self.store.set(f"epoch/{self._epoch}", json.dumps(ready))


class TorchftLaunch(Launch):
    """Launches workers with torchft's Manager, and their Lighthouse."""

    worker_module = "benches.compare.torchft_worker"

    def open(self) -> None:
        """Start a Lighthouse with the settings of an evermoe job's."""
        from evermoe.comm.lighthouse import start_local_lighthouse

        limits = LocalJob([], "compare", 1)
        server, self._address = start_local_lighthouse(
            heartbeat_timeout=limits.heartbeat_timeout, join_timeout=self.options.hang_timeout
        )
        self._resources.callback(server.shutdown)

    def arguments(self, worker: int) -> list[str]:
        """Return the flags with the Lighthouse's address."""
        return [*super().arguments(worker), "--store", self._address]

    def changed(self) -> None:
        """Let the workers begin once the first ones have started."""
        if len(self.started()) == self.options.workers:
            (self.folder / "begin").touch()


class InProcessLaunch(Launch):
    """Launches workers that NVIDIA's resiliency extension restarts within their processes. It admits no new ones."""

    worker_module = "benches.compare.inprocess_worker"
    takes_joins = False

    def open(self) -> None:
        """Start the store in which the ranks meet."""
        self.store = start_store()

    def arguments(self, worker: int) -> list[str]:
        """Return the flags with the store's address."""
        return [*super().arguments(worker), "--store", f"127.0.0.1:{self.store.port}"]

    def _spawn(
        self, worker: int, arguments: list[str], log: Any, variables: Mapping[str, str] = MappingProxyType({})
    ) -> subprocess.Popen[Any]:
        place = {**variables, "RANK": str(worker), "WORLD_SIZE": str(self.options.workers)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
        return super()._spawn(worker, arguments, log, place)


class Candidate(NamedTuple):
    """An entry of the comparison."""

    title: str
    """Title in tables."""
    summary: str
    """Summary in one line."""
    launch: Callable[[argparse.Namespace, Path], Launch]
    package: str | None = None
    """Package that must be installed besides evermoe's dependencies."""


def node(worker: int) -> str:
    """Return the name of a worker's node."""
    return f"node-{worker:03d}"


def start_store() -> Any:
    """Start a TCPStore in this process, at a free port."""
    import torch.distributed as dist

    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def _preset(name: PresetName) -> Candidate:
    return Candidate(
        name,
        PRESETS[name].summary,
        lambda options, folder: PresetLaunch(options, folder, name),
    )


CANDIDATES: Mapping[str, Candidate] = {
    **{name: _preset(name) for name in PRESET_NAMES},
    "ds": Candidate(
        "DS", "torchrun restarts all workers from the newest checkpoint of DCP's async_save", RestartLaunch
    ),
    "ds-ft": Candidate(
        "DS(FT)", "fixed expert-parallel groups; a group that loses a worker is dropped", FixedGroupsLaunch
    ),
    "torchft": Candidate(
        "torchft", "a replica group for each worker, each with all experts; a peer heals a new one", TorchftLaunch
    ),
    "nvrx": Candidate(
        "NVRx", "NVIDIA's resiliency extension: all remaining processes restart training in place", InProcessLaunch,
        package="nvidia_resiliency_ext",
    ),
}  # fmt: skip
"""Candidates by the name that `--candidate` takes."""
