"""Starts real worker processes and waits for what they say. `history.py` checks what they have said."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from evermoe import _native
from evermoe.comm.lighthouse import start_lighthouse
from evermoe.process.memory_folder import job_folder
from evermoe.process.reports import EventFile
from support import worker
from support.flat_options import frequent_copies
from support.worker import Fault, Options

PATIENCE = 40.0
"""Seconds until a test gives up on something that should happen at once."""
HEARTBEAT_LIMIT = 1.0
LIMITS = {"hang_timeout": 30.0, "quorum_timeout": 60.0, "rejoin_timeout": 1.0}
"""Of jobs in tests: a busy machine does not exceed the first two, and a test that is about one sets its own. Only units
of processes that have ended are given up after the last: a test in which one comes back sets a longer one."""
FEWEST = {"expert_slots": 1}
"""No expert has a second active replica if there are as many slots without."""

Event = dict[str, Any]

# Children are forked from a process that has everything imported: a hundred times quicker than a new one.
SERVER = multiprocessing.get_context("forkserver")
PRELOADED = [
    "pytest",
    "evermoe.session.session",
    "evermoe.pipeline.pipeline",
    "torchft.process_group",
    "torchft.coordination",
    "torch._dynamo",
    "torch.distributed.pipelining",
    "evermoe.profile",
    "transformers.models.mixtral.modeling_mixtral",
    "support.worker",
    "support.pipeline_worker",
    "support.frozen",
]
SERVER.set_forkserver_preload(PRELOADED)
os.environ["PYTHONPATH"] = os.pathsep.join(  # where the server finds the last of these
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)
os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "RUST_LOG": "warn"}
os.environ |= {"RES_OPTIONS": "timeout:1 attempts:1"}  # each TCPStore client asks DNS for 127.0.0.1's name


def wait_until(what: Callable[[], Any], why: str, limit: float = PATIENCE) -> Any:
    """The first true value of `what()`."""
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        value = what()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {limit:.0f} s: {why}")


class Worker:
    """One process, and what it has written so far."""

    main = staticmethod(worker.main)

    def __init__(self, options: Options) -> None:
        self.options, self.name = options, options.name
        self.process = SERVER.Process(target=self.main, args=(options,), daemon=True)
        self.process.start()
        assert self.process.pid is not None
        self.pid: int = self.process.pid
        self._file = EventFile(Path(options.folder) / f"{self.name}.{self.pid}.jsonl")
        self._events: list[Event] = []

    def events(self, name: str | None = None, **fields: Any) -> list[Event]:
        self._events += self._file.read()
        return [e for e in self._events if name in (None, e["event"]) and all(e.get(k) == v for k, v in fields.items())]

    def wait_for(self, name: str, limit: float = PATIENCE, count: int = 1, **fields: Any) -> Event:
        """The `count`-th such event; an error if the process ends without one."""

        def found() -> Event | None:
            ended = not self.process.is_alive()
            events = self.events(name, **fields)
            if len(events) < count and ended:
                raise AssertionError(f"{self.name} ended without {name} {fields}\n{self.log()}")
            return events[count - 1] if len(events) >= count else None

        return wait_until(found, f"{name} {fields} of {self.name}; its last: {self.events()[-3:]}", limit)

    def join(self, limit: float = PATIENCE) -> int:
        """The exit code; negative for a signal."""
        self.process.join(limit)
        assert self.process.exitcode is not None, f"{self.name} has not ended: {self.events()[-3:]}\n{self.log()}"
        return self.process.exitcode

    def wait_until_stopped(self) -> None:
        stat = Path(f"/proc/{self.pid}/stat")
        wait_until(lambda: stat.read_text().rsplit(")", 1)[1].split()[0] == "T", f"{self.name} is stopped")

    def has_met_members(self) -> bool:
        """Whether the Lighthouse has named it together with members that train."""
        met = (each for event in self.events("protocol") for each in event["said"].get("participants", []))
        return any(each["standing"]["established"] for each in met)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def log(self, characters: int = 3000) -> str:
        """The end of what it has printed."""
        path = Path(self.options.folder) / f"{self.name}.{self.pid}.log"
        return path.read_text()[-characters:] if path.exists() else ""


class Job:
    """A Lighthouse, a place in shared memory and the workers; `close` leaves nothing behind."""

    def __init__(
        self, folder: Path, members: int, lighthouse: str | None = None, *, join_timeout: float = 5.0, **session: Any
    ) -> None:
        self.folder = folder
        self.name = f"t{uuid.uuid4().hex[:8]}"
        root = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else folder
        self.memory = root / f"evermoe-test-{os.getpid()}-{self.name}"
        self.memory.mkdir(mode=0o700)
        self._join_timeout = join_timeout
        self._lighthouse = None if lighthouse else self._start_lighthouse()
        self.address = lighthouse or self._lighthouse.address()
        defaults = LIMITS | {
            "members": members,
            "join_interval": 5,
        }
        places = {"job": self.name, "memory_dir": str(self.memory)}
        self.session = defaults | places | session
        self.workers: list[Worker] = []
        self.open_gate(worker.EVERYTHING)

    def start(
        self,
        name: str,
        *faults: Fault,
        session: dict[str, Any] | None = None,
        kind: type[Worker] = Worker,
        **options: Any,
    ) -> Worker:
        """A worker on the node `name`."""
        arguments = {"folder": str(self.folder), "lighthouse": self.address} | options
        fields = {"node": name} | self.session | (session or {})
        fields = frequent_copies(fields) | fields
        self.workers.append(kind(Options(name=name, faults=list(faults), session=fields, **arguments)))
        return self.workers[-1]

    def start_all(self, faults: dict[str, list[Fault]], names: str = "abc", **options: Any) -> list[Worker]:
        return [self.start(name, *faults.get(name, []), **options) for name in names]

    def open_gate(self, step: int) -> None:
        """Lets all gated workers pass up to `step` (exclusive)."""
        self._gate = step
        draft = self.folder / "gate.new"
        draft.write_text(str(step))
        draft.rename(self.folder / "gate")

    def take_in(self, *joiners: Worker, until: int) -> None:
        """Opens the gate up to `until` once the members, who look for newcomers on the way, know of the joiners.

        The members ask the Lighthouse during their steps: without a gate they may all be done before it answers.
        """
        for each in joiners:
            each.wait_for("phase", phase="agree")
        every = self.session["join_interval"]
        self.open_gate((self._gate // every + 1) * every + 1)
        for each in joiners:
            knows = lambda each=each: each.has_met_members() or not each.process.is_alive()  # noqa: E731
            wait_until(knows, f"{each.name} and the members are named together")
        self.open_gate(until)

    def wake(self) -> None:
        """Ends the faults in which workers hang."""
        (self.folder / "wake").touch()

    def node_memory(self, name: str) -> Path:
        return job_folder(self.memory, self.name) / name

    def lose_node(self, name: str) -> None:
        """The machine is gone: nothing finds its memory again."""
        shutil.rmtree(self.node_memory(name))

    def arenas(self) -> list[Path]:
        return sorted(self.memory.glob("**/*.arena"))

    def stop_lighthouse(self) -> None:
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
            self._lighthouse = None

    def restart_lighthouse(self) -> None:
        """A new Lighthouse at the old address, without any memory."""
        self.stop_lighthouse()
        port = self.address.rsplit(":", 1)[1]
        self._lighthouse = self._start_lighthouse(bind=f"0.0.0.0:{port}")

    def _start_lighthouse(self, **options: Any) -> Any:
        return start_lighthouse(heartbeat_timeout=HEARTBEAT_LIMIT, join_timeout=self._join_timeout, **options)

    def close(self) -> None:
        for each in self.workers:
            if each.process.is_alive():
                each.process.kill()
            each.process.join(10)
        self.stop_lighthouse()
        shutil.rmtree(self.memory, ignore_errors=True)
        check_protocol(self.workers)


def check_protocol(workers: Iterable[Worker]) -> None:
    """The machine that the model checker explores is the one that ran: it gives the commands that were carried out."""
    for each in workers:
        record = [(event["said"], event["commands"]) for event in each.events("protocol")]
        if record:  # none of a process that was killed before it had a session
            check_record(record)


def check_record(record: list[tuple[dict[str, Any], list[dict[str, Any]]]]) -> None:
    """Feeds what a member has recorded to the machine again, which must give the same commands.

    Args:
        record: what `on_record` received, from the start, as it was read from JSON.

    Raises:
        ValueError: the machine gives another command than the one that was carried out.
    """
    machine = _native.Protocol(record[0][0])
    for number, (event, commands) in enumerate(record[1:]):
        found = json.loads(json.dumps(machine.handle(event)))
        if found != commands:
            raise ValueError(f"event {number}, {event}: the protocol gives {found}, recorded was {commands}")


def as_json(options: Options) -> str:
    """The command-line argument of `worker.py`."""
    return json.dumps(dataclasses.asdict(options))


def free_ports(count: int) -> int:
    """The first of `count` free ports in a row, below those that the system gives to connections as they are made."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        first = random.SystemRandom().randrange(lowest // 2, lowest - count)
        with contextlib.ExitStack() as servers, contextlib.suppress(OSError):
            for port in range(first, first + count):
                servers.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise OSError(f"expected {count} free ports in a row between {lowest // 2} and {lowest}, found none")
