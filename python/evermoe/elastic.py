"""Who is alive, agreed by all. Only this module and `group` know torchft.

torchft's Lighthouse decides who is alive: every member beats from a native thread and asks for a quorum; the answer
is the same for all. `Membership.agree` turns a quorum into rebuilt groups. There is one TCPStore client per store host,
and a new prefix for each group: each new client costs a reverse DNS look-up.
"""

from __future__ import annotations

import hashlib
import logging
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torchft.coordination import LighthouseClient, LighthouseServer, ManagerServer

from evermoe.errors import JoinTimeout
from evermoe.group import Group

logger = logging.getLogger(__name__)

HEARTBEAT_SECONDS = 0.1
"""How often a member tells the Lighthouse that it lives."""
RETURN_SECONDS = 1.0
"""Time that members which nothing is wrong with get to reach a Lighthouse that has just come back."""


Role = Literal["train", "replica"]


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
