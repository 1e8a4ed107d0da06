"""Who is alive, agreed by all, and the collectives among them. The only module that knows torchft.

torchft's Lighthouse decides who is alive: every member beats from a native thread and asks for a quorum; the answer
is the same for all. `Membership.agree` turns a quorum into a rebuilt `Group`. Rules that the code below keeps:

* a member that sees an error closes its own sockets *before* it waits for anybody, or its peers stall on it;
* no `Work` and no exception of a collective outlives the call, because both keep sockets open;
* one TCPStore client per store host, a new prefix for each group (each new client costs a reverse DNS look-up).
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

os.environ.setdefault("RUST_LOG", "warn")  # torchft reads it when it is imported, and logs every quorum otherwise

from torchft.coordination import LighthouseClient, LighthouseServer, ManagerServer
from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL

from evermoe.errors import JoinTimeout, PeerLost

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.1
"""How often a member tells the Lighthouse that it lives."""
RETURN_SECONDS = 1.0
"""Time that members which nothing is wrong with get to reach a Lighthouse that has just come back."""
_NEVER_SENT = 0x7FFF_FFFF
"""Tag of no message."""
CONNECT_SECONDS = 3.0
"""Time to connect, per hundred members: they agreed a moment ago, so one that takes longer has died since then."""


def _ignore(name: str) -> None:
    pass


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0] or "the group was aborted"


class Group:
    """The members now and the collectives among them; `rank` and `size` change when the membership does.

    A fresh `Group()` has one member and needs no network. Every failure of a peer is raised as `PeerLost`, after
    this member's own sockets are closed; from then on every call raises `PeerLost` until the group is rebuilt.
    Tensors on the CPU travel over gloo, tensors on a GPU over NCCL. `is_shared`: threads may wait for transfers while
    another one drops the group.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self.rank = 0
        self.size = 1
        self._groups: dict[str, Any] = {}
        self._timeout = timedelta(0)
        self._is_shared = is_shared
        self.broken: str | None = None
        self.linked: list[Group] = []
        """Groups that are dropped with this one."""
        self.on_begin: Callable[[str], None] = _ignore
        """Is told the name of each collective before it begins."""
        self.on_end: Callable[[str], None] = _ignore
        """Is told the name of each collective after it has ended."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum of `tensor` over all members, in place; the same bits on every member."""
        return self._call("all_reduce", tensor, lambda pg: pg.allreduce([tensor], c10d.AllreduceOptions()))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[size, *tensor.shape]`: what each member brought, by rank. Shapes must agree."""
        if self.size == 1 and self.broken is None:
            return tensor[None].clone()
        gathered = [torch.empty_like(tensor) for _ in range(self.size)]
        self._call("all_gather", tensor, lambda pg: pg.allgather([gathered], [tensor], c10d.AllgatherOptions()))
        return torch.stack(gathered)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """What each member brought, by rank; lengths may differ."""
        lengths = self.all_gather(torch.tensor([len(data)], dtype=torch.int64)).flatten().tolist()
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else 0
        rows = self.all_gather(mine)
        return [rows[i, :length].numpy().tobytes() for i, length in enumerate(lengths)]

    def all_to_all(self, rows: torch.Tensor, send_counts: list[int], receive_counts: list[int]) -> torch.Tensor:
        """Uneven exchange along dim 0: the first `send_counts[0]` rows go to rank 0, and so on.

        `rows` is `[sum(send_counts), ...]`, contiguous; the result `[sum(receive_counts), ...]`, by source rank.
        """
        if len(send_counts) != self.size or len(receive_counts) != self.size or sum(send_counts) != len(rows):
            raise ValueError(
                f"all_to_all among {self.size} members: expected {self.size} counts each way and send counts that "
                f"sum to the {len(rows)} rows, got send_counts={send_counts}, receive_counts={receive_counts}"
            )
        received = rows.new_empty((sum(receive_counts), *rows.shape[1:]))
        if self.size == 1 and self.broken is None:
            return received.copy_(rows)
        rows = rows.contiguous()
        options = c10d.AllToAllOptions()
        self._call(
            "all_to_all",
            rows,
            lambda pg: pg.alltoall_base(received, rows, receive_counts, send_counts, options),
        )
        return received

    def exchange(self, sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]]) -> None:
        """Point-to-point: sends each tensor to its rank while receiving each tensor, in place, from its rank.

        Between two members, messages pair up in the order in which each side lists them. CPU tensors only.
        """
        if not sends and not receives:
            return

        def start(pg: Any) -> list[Any]:
            works = [pg.recv([tensor], source, 0) for tensor, source in receives]
            return works + [pg.send([tensor], destination, 0) for tensor, destination in sends]

        self._call("exchange", (sends or receives)[0][0], start)

    def receive(self, tensor: torch.Tensor, source: int, tag: int) -> Transfer:
        """Begins to receive into a tensor on the CPU, which may be larger than what comes."""
        return self._transfer("receive", lambda pg: pg.recv([tensor], source, tag))

    def send(self, tensor: torch.Tensor, destination: int, tag: int) -> Transfer:
        """Begins to send a tensor on the CPU; messages of one tag between two members keep their order."""
        return self._transfer("send", lambda pg: pg.send([tensor], destination, tag))

    def _transfer(self, name: str, start: Callable[[Any], Any]) -> Transfer:
        if self.broken is not None:
            raise PeerLost(f"{name} among {self.size} members failed: {self.broken}")
        try:
            return Transfer(self, name, start(self._groups["cpu"]))
        except (RuntimeError, AssertionError) as error:
            failure = _first_line(error)
        self.drop(failure)
        raise PeerLost(f"{name} among {self.size} members failed: {failure}")

    def _call(self, name: str, tensor: torch.Tensor, start: Callable[[Any], Any]) -> torch.Tensor:
        if self.broken is None and self.size == 1:
            return tensor
        failure = self.broken
        if failure is None:
            self.on_begin(name)
            failure = self._wait(start, "cuda" if tensor.is_cuda else "cpu")
            self.on_end(name)
        if failure is not None:  # outside any `except`: the collective's exception must not live on as a context
            self.drop(failure)
            raise PeerLost(f"{name} among {self.size} members failed: {failure}")
        return tensor

    def _wait(self, start: Callable[[Any], Any], device: str) -> str | None:
        try:
            works = start(self._groups[device])
            if not isinstance(works, list):
                works.wait()
                return None
            for work in works:  # gloo's point-to-point would wait as long as connecting may take
                work.wait(self._timeout)
        except (RuntimeError, AssertionError) as error:  # torchft asserts that a group it has aborted is there
            return _first_line(error)
        return None

    @property
    def limit_seconds(self) -> float:
        """How long a collective waits for a silent member."""
        return self._timeout.total_seconds()

    def is_whole(self) -> bool:
        """Whether everything that was started on a GPU has arrived: NCCL's waits only order streams. Waits for it."""
        nccl = self._groups.get("cuda") if self.size > 1 else None
        if nccl is None:
            return True
        torch.cuda.current_stream().synchronize()
        return self.broken is None and nccl.errored() is None

    def drop(self, reason: str) -> None:
        """Closes this member's sockets, so that peers that wait for it fail at once. Idempotent."""
        self._drop_alone(reason)
        for other in self.linked:
            other._drop_alone(reason)

    def _drop_alone(self, reason: str) -> None:
        self.broken = self.broken or reason
        for group in self._groups.values():
            if self._is_shared:
                self._end_waiting(group)
            group.abort(errored=False)

    def _end_waiting(self, group: Any) -> None:
        """Ends all threads' waits for transfers, here and at the peers.

        Gloo has no call for that, and its sockets stay open while anybody waits. But a wait that times out closes them.
        """
        with suppress(RuntimeError, AssertionError):
            if self.size > 1 and group._pg is not None:
                never = group.recv([torch.empty(1)], (self.rank + 1) % self.size, _NEVER_SENT)
                never.wait(timedelta(milliseconds=1))

    def rebuild(self, store: Any, rank: int, size: int, device: torch.device, timeout: timedelta) -> None:
        """Connects the members of a new epoch. `store` holds a prefix that no other epoch uses."""
        self._drop_alone("the group is being rebuilt")
        if not self._groups:
            self._groups["cpu"] = ProcessGroupGloo(timeout=timeout)
            if device.type == "cuda":
                torch.cuda.set_device(device)
                self._groups["cuda"] = ProcessGroupNCCL(timeout=timeout)
        self.rank, self.size, self._timeout = rank, size, timeout
        if size > 1:
            connect = timedelta(seconds=CONNECT_SECONDS * (1 + size // 100))
            self._groups["cpu"].set_timeout(min(connect, timeout))
            for name, group in self._groups.items():
                group._pg = group._create_pg(dist.PrefixStore(name, store), rank, size)
            self._groups["cpu"]._pg._get_backend(torch.device("cpu")).set_timeout(timeout)
        self.broken = None


Role = Literal["train", "replica"]


class Transfer:
    """A message between two members that is under way."""

    def __init__(self, group: Group, name: str, work: Any) -> None:
        self._group, self._name, self._work = group, name, work

    def wait(self, limit: timedelta | None = None) -> None:
        """Until the tensor was sent, or has arrived; for as long as a collective would wait unless `limit` says more.

        Raises:
            PeerLost: the other member is gone or silent, or the group was dropped here.
        """
        work, self._work = self._work, None  # a work that lives keeps sockets open
        failure = None
        try:
            work.wait(self._group._timeout if limit is None else limit)
        except (RuntimeError, AssertionError) as error:
            failure = _first_line(error)
        del work
        if failure is not None:
            self._group.drop(failure)
            raise PeerLost(f"{self._name} among {self._group.size} members failed: {failure}")


@dataclass
class _Agreement:
    epoch: str | None = None
    """Names the group that this member is connected in; None when it is connected in none."""
    ids: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Identity:
    """What members of one job have in common; others may not join it."""

    job: str
    layout: str
    """Digest of the model's and optimizer's units."""
    options: str = ""
    """Of the session, where they must be the same."""


class Membership:
    """Agrees with the living on who takes part, and rebuilds `group` when that changed."""

    def __init__(
        self,
        *,
        lighthouse: str,
        identity: Identity,
        node: str,
        device: torch.device,
        hang_limit: float,
        agree_limit: float,
        role: Role = "train",
    ) -> None:
        self.id = f"{node}-{uuid.uuid4().hex[:8]}"
        self.node = node
        self.identity = identity
        self.role = role
        self.group = Group()
        """Those that train. On a replica node it has one member."""
        self.background = Group(is_shared=True)
        """All members, replica nodes included, for the transfers of other threads."""
        self._with_replicas = Group()
        self.group.linked = [self._with_replicas, self.background]
        self._with_replicas.linked = [self.group, self.background]
        self.established = False
        """Set by the session: this member has state of the running job."""
        self.generation = 0
        self.nodes: list[str] = []
        """Per rank, the machine whose memory dies with it; several members may share one. Replica nodes come last."""
        self.trainers = 1
        """How many members train."""
        self.store: Any = None
        """Of the members now: where groups of others can meet, under a prefix that no other epoch uses."""
        self.device = device
        """Of the tensors that `group` takes."""
        self._lighthouse = lighthouse
        self._hang_limit = timedelta(seconds=hang_limit)
        self._agree_limit = agree_limit
        self._quorum_limit = max(30.0, 2 * hang_limit)
        self._patience = 0.0
        self.saw_running = False
        """Whether the job was seen to run: a member without its state must then never start it again."""
        self._agreement = _Agreement()
        self._client: Any = None
        self._heart: Any = None
        self._stores: dict[str, Any] = {}
        self._own_store = dist.TCPStore(
            _hostname(), 0, is_master=True, wait_for_workers=False, timeout=self._hang_limit
        )
        self._stores[self._store_address] = self._own_store

    @property
    def everyone(self) -> Group:
        """All members: those that train, with the ranks that they have in `group`, then replica nodes."""
        return self.group if self.trainers == len(self.nodes) or not self.nodes else self._with_replicas

    @property
    def _store_address(self) -> str:
        return f"{self._own_store.host}:{self._own_store.port}"

    def agree(
        self,
        *,
        expected: int = 1,
        on_wait: Callable[[], None] = lambda: None,
        on_quorum: Callable[[], None] = lambda: None,
    ) -> bool:
        """Collective over the living. True when the membership changed: `group` and `nodes` are then new.

        `expected`: a job in which nobody is established yet waits for that many members, and calls `on_wait`
        meanwhile. `on_quorum` is called between the agreement on a new membership and the rebuilding of the group.
        Members are ordered by id; `rank` is the position.

        Raises:
            JoinTimeout: too few members, or no Lighthouse, within `agree_limit` seconds.
            ValueError: the Lighthouse serves another job, or the job trains another model.
        """
        deadline = time.monotonic() + self._agree_limit
        if self.group.broken is not None:
            self._agreement = _Agreement()
        problem = "no answer"
        # With nothing wrong here, who is absent may just not have reached a Lighthouse that is new.
        self._patience = RETURN_SECONDS if self.group.broken is None else 0.0
        answered: float | None = None
        while time.monotonic() < deadline:
            try:
                asked = self._without_strangers(self._ask(deadline))
                answered = answered or time.monotonic()
                self._patience = min(self._patience, max(0.0, answered + RETURN_SECONDS - time.monotonic()))
                trainers = sum(member.data["role"] == "train" for member in asked)
                if trainers < (1 if any(m.data["established"] for m in asked) else expected):
                    problem = f"{trainers} of {expected} members have come"
                    on_wait()
                    time.sleep(0.05)
                    continue
                if self._awaits_others(asked):
                    time.sleep(0.05)
                    continue
                return self._adopt(asked, on_quorum)
            except (RuntimeError, TimeoutError, ConnectionError) as error:
                problem = str(error).split("\n", 1)[0]
                logger.info("agreement failed, trying again: %s", problem)
                self._client = None
                self._agreement = _Agreement()
                self.group.drop(problem)
                time.sleep(0.1)
        raise JoinTimeout(
            f"no agreement on the members within {self._agree_limit:.0f} s (Lighthouse {self._lighthouse}): {problem}. "
            "Check that the Lighthouse runs and is reachable, and that all workers were started with its address."
        )

    def _ask(self, deadline: float) -> list[Any]:
        try:
            return self._quorum(deadline)
        except (RuntimeError, TimeoutError, ConnectionError):
            self._patience = RETURN_SECONDS  # the Lighthouse may come back without any memory
            raise

    @staticmethod
    def _awaits_others(asked: list[Any]) -> bool:
        """Whether some are absent and all are patient. From the quorum's data alone, so that all decide the same."""
        established = [member.data for member in asked if member.data["established"]]
        if not established:
            return False
        absent = max(data["size"] for data in established) > len(established)
        return absent and min(data["patience"] for data in established) > 0

    def _quorum(self, deadline: float) -> list[Any]:
        limit = timedelta(seconds=max(0.1, min(deadline - time.monotonic(), self._quorum_limit)))
        if self._client is None:
            self._client = LighthouseClient(self._lighthouse, limit)
        if self._heart is None:
            self._heart = ManagerServer(
                self.id,
                self._lighthouse,
                socket.gethostname(),
                "0.0.0.0:0",
                "",
                1,
                timedelta(seconds=HEARTBEAT_SECONDS),
                limit,
                0,
            )
        data = {
            "epoch": self._agreement.epoch,
            "established": self.established,
            "size": len(self.nodes),
            "patience": self._patience,
            "job": self.identity.job,
            "layout": self.identity.layout,
            "options": self.identity.options,
            "generation": self.generation,
            "node": self.node,
            "role": self.role,
            "store": self._store_address,
        }
        quorum = self._client.quorum(self.id, limit, world_size=1, data=data)
        return sorted(quorum.participants, key=lambda member: member.replica_id)

    def _without_strangers(self, asked: list[Any]) -> list[Any]:
        """Those of this job; it is theirs who are established, or else of the first by id."""
        asked = [member for member in asked if "layout" in (member.data or {})]  # others use the Lighthouse otherwise
        first = next((member for member in asked if member.data["established"]), asked[0]).data
        if not self.established and first["job"] != self.identity.job:
            raise ValueError(
                f"the Lighthouse {self._lighthouse} serves job {first['job']!r}, this worker belongs to job "
                f"{self.identity.job!r}: start one Lighthouse for each job"
            )
        if not self.established and first["layout"] != self.identity.layout:
            raise ValueError(
                f"this worker's model or optimizer differs from that of job {first['job']!r}: their units have other "
                "names, shapes or types. Start it with the same script and options as the others."
            )
        if not self.established and first["options"] != self.identity.options:
            raise ValueError(
                f"this worker's options differ from those of job {first['job']!r}, which has {first['options']}; here "
                f"they are {self.identity.options}"
            )
        mine = {"job": self.identity.job, "layout": self.identity.layout, "options": self.identity.options}
        ours = [member for member in asked if {key: member.data[key] for key in mine} == mine]
        self.saw_running = self.saw_running or any(member.data["established"] for member in ours)
        return ours

    def _adopt(self, asked: list[Any], on_quorum: Callable[[], None]) -> bool:
        asked = sorted(asked, key=lambda member: (member.data["role"] != "train", member.replica_id))
        ids = [member.replica_id for member in asked]
        epochs = {member.data["epoch"] for member in asked}
        if ids == self._agreement.ids and epochs == {self._agreement.epoch} and None not in epochs:
            return False
        on_quorum()
        self.generation = 1 + max(int(member.data["generation"]) for member in asked)
        epoch = hashlib.sha256(repr((ids, self.generation)).encode()).hexdigest()[:16]
        store = dist.PrefixStore(epoch, self._store(asked[0].data["store"]))
        self.nodes = [member.data["node"] for member in asked]
        self.trainers = sum(member.data["role"] == "train" for member in asked)
        self._rebuild(store, ids.index(self.id), len(ids))
        self.store = dist.PrefixStore("others", store)
        self._agreement = _Agreement(epoch, ids)
        return True

    def _rebuild(self, store: Any, rank: int, size: int) -> None:
        self.group.drop("the group is being rebuilt")
        cpu, limit = torch.device("cpu"), self._hang_limit
        self.background.rebuild(dist.PrefixStore("background", store), rank, size, cpu, limit)
        if size > self.trainers:
            self._with_replicas.rebuild(dist.PrefixStore("everyone", store), rank, size, cpu, limit)
        if self.role == "train":
            self.group.rebuild(store, rank, self.trainers, self.device, limit)
        else:
            self.group.rebuild(store, 0, 1, cpu, limit)

    def _store(self, address: str) -> Any:
        if address not in self._stores:
            host, port = address.rsplit(":", 1)
            self._stores[address] = dist.TCPStore(
                host, int(port), is_master=False, wait_for_workers=False, timeout=self._hang_limit
            )
        return self._stores[address]

    def close(self) -> None:
        """Leaves the job: closes sockets and stops the heartbeat."""
        self.group.drop("this member has left")
        if self._heart is not None:
            self._heart.shutdown()
            self._heart = None


def _hostname() -> str:
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return "127.0.0.1"
    return name


def start_local_lighthouse(*, heartbeat_limit: float, join_limit: float) -> tuple[Any, str]:
    """A Lighthouse that only this machine can reach, and its address."""
    server = start_lighthouse(heartbeat_limit=heartbeat_limit, join_limit=join_limit, bind="127.0.0.1:0")
    return server, f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"


def start_lighthouse(*, heartbeat_limit: float, join_limit: float, bind: str = "0.0.0.0:0") -> Any:
    """Starts torchft's Lighthouse inside this process; `.address()` is what members need, `.shutdown()` ends it.

    Args:
        heartbeat_limit: seconds without a heartbeat after which a member counts as dead.
        join_limit: seconds that a quorum waits for a member that beats but does not ask (busy, or hung).
        bind: `host:port` to listen on; port 0 picks a free one.
    """
    return LighthouseServer(
        bind=bind,
        min_replicas=1,
        join_timeout_ms=round(join_limit * 1000),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=round(heartbeat_limit * 1000),
    )
