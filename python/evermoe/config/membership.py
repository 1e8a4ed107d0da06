"""Options that connect a process to its job: who the members are, and how long they wait for each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from evermoe.events import MemberLost
from evermoe.options import MAX_SECONDS, MIN_SECONDS, Options, check_name, option

Role = Literal["train", "replica", "spare"]
Carrier = Literal["tcp", "ucx"]
OnCorruption = Literal["repair", "evict", "stop", "ignore"]
OnSlow = Literal["warn", "shift", "evict"]
OnSick = Literal["evict", "warn", "ignore"]


@dataclass(frozen=True, kw_only=True)
class Membership(Options):
    """Connect a process to its job, and set how long members wait for each other.

    A field that has its default is read from the environment variable that it names, then from the variables of a
    launcher.
    """

    lighthouse: str | None = option(None, env="EVERMOE_LIGHTHOUSE")
    """Address of the job's Lighthouse, `http://host:port` (default: TORCHFT_LIGHTHOUSE). Several are separated by
    commas: members ask the first that answers, and only a majority continues after a failure. None: a job of this
    process alone."""
    job: str | None = option(None, is_name=True, env="EVERMOE_JOB")
    """Name of the job, the same for all members. It names the job's shared memory. Default: with a Lighthouse JOB_ID,
    SLURM's or torchrun's; without one a name that no other process finds."""
    node: str | None = option(None, is_name=True, env="EVERMOE_NODE")
    """Name of the machine, whose memory is lost as one (default: the host's name)."""
    domain: str | None = option(None, env="EVERMOE_DOMAIN")
    """Failure domains of this node from the largest to the smallest, such as `zone-a/rack-3`. Copies are spread over
    the largest domains of which there are enough. Default: srun's SLURM_TOPOLOGY_ADDR, else the node alone."""
    address: str | None = option(None, env="EVERMOE_ADDRESS")
    """Name or address at which other members reach this process, and on which it listens. Addresses of further network
    cards may follow, separated by commas: the connections for copies and recoveries take turns among all of them.
    Default: loopback if the Lighthouse's address is, else the host's name, listening on all addresses; where that name
    does not resolve, the address on the route to the Lighthouse."""
    members: int | None = option(None, least=1, env="EVERMOE_MEMBERS")
    """Number of members that a new job waits for; later ones join at any time. Default: with a Lighthouse WORLD_SIZE or
    srun's tasks, else 1."""
    role: Role = option("train", env="EVERMOE_ROLE")
    """`replica`: keep copies for the others and do not train. `spare`: train only once fewer than `members` do, and
    replace a lost member in the recovery that its loss starts; a new job waits up to `hang_timeout` for others before a
    spare completes their number."""
    allow_solo_resume: bool = option(False, env="EVERMOE_ALLOW_SOLO_RESUME")
    """Resume instead of raising `LeftBehind` when no newer member survives."""
    on_lost: str | Callable[[MemberLost], object] | None = option(None, env="EVERMOE_ON_LOST")
    """Called once in the job for each lost member, to ask for another machine: a shell command, or a function of the
    event `MemberLost`, in a thread of its own."""
    memory_dir: str | None = option(None, env="EVERMOE_MEMORY_DIR")
    """Folder of named shared memory (default: /dev/shm)."""
    heartbeat_timeout: float = option(2.0, least=MIN_SECONDS, most=MAX_SECONDS)
    """Seconds after which a member counts as lost whose process is stopped, whose host is gone, or whose network is
    cut."""
    hang_timeout: float = option(30.0, least=MIN_SECONDS, most=MAX_SECONDS)
    """Seconds that a collective waits for a silent peer. It must exceed the largest difference between the members'
    steps, and the time that a checkpoint takes."""
    quorum_timeout: float = option(300.0, least=MIN_SECONDS, most=MAX_SECONDS)
    """Seconds within which members must agree on who takes part, an outage of the Lighthouse included."""
    rejoin_timeout: float = option(30.0, least=0, most=MAX_SECONDS)
    """Seconds that members wait for the holders of missing units to return before these units count as lost."""
    drain_timeout: float = option(30.0, least=0, most=MAX_SECONDS)
    """Seconds from SIGTERM, SIGUSR1 or SIGUSR2 until this process ends although its step is not over. 0: evermoe
    handles none of these signals."""
    transport: Carrier = option("tcp", shared=True)
    """Transport of copies and recoveries between members' memories. `ucx` uses RDMA where UCX and the network have it;
    its library is found by name, in the package libucx-cu12, or at EVERMOE_UCX."""
    on_corruption: OnCorruption = option("repair", shared=True)
    """Action where members of a session that must hold the same bits differ. In each vote they compare digests of a
    part of the state and the gradients, and refuse the update if these are not equal; of three or more, the majority
    names the member that differs. `repair`: all take the state of the majority and repeat the step; a member that
    differs again in this step, or in a third one, leaves. `evict`: it leaves at once, with `CorruptState`. `stop`: all
    raise `CorruptState`. Where a replica that repeats steps differs from its trainer, a third member names the one that
    is wrong: it leaves with `evict`; with `repair` the replica takes the trainer's state. `ignore`: compare nothing."""
    on_slow: OnSlow = option("warn", shared=True)
    """Action where a member of a session is named as slower than the others (`SlowMember`). `warn`: none but the names.
    `shift`: it gets fewer samples of each batch, and the others more, until all take as long (`ElasticSampler` and
    `ElasticLoader`); its part grows again with its speed. `evict`: it leaves after the next step, which nobody repeats,
    and its process ends as on SIGTERM (code 143). This happens among three members or more, and only if the others are
    faster without it: with n members, it takes more than n / (n - 1) times as long as they do."""
    on_sick: OnSick = option("evict")
    """Action where this member's GPU or processor is faulty: it fails the self-test before the member joins, NVML
    reports an Xid error after which NVIDIA demands a reset, or that the GPU is lost or must be reset. `evict`: the
    process does not join (`UnfitNode`); a member leaves after its step, which nobody repeats, and its process ends as
    on SIGTERM (code 143), unless no other member trains. The others then admit no newcomer on this hardware. `warn`:
    none but the log and the event `SickNode`, which also name a host without free memory and a full checkpoint folder.
    `ignore`: test and watch nothing."""
    join_interval: int = option(5, shared=True, least=1)
    """Steps between checks for new members, in the background."""
    join_wait: float = option(0.0, shared=True, least=0, most=MAX_SECONDS)
    """Seconds from the first sign of a newcomer until it is admitted, together with all that have come meanwhile: one
    interruption for all. A recovery after a loss admits newcomers at once. Must be below `quorum_timeout`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in self.domain.split("/") if self.domain is not None else ():
            check_name("each part of domain (EVERMOE_DOMAIN), between slashes,", part)
        if self.join_wait >= self.quorum_timeout:
            raise ValueError(
                f"newcomers wait for join_wait = {self.join_wait:g} s, and give up after quorum_timeout = "
                f"{self.quorum_timeout:g} s: expected a shorter join_wait, or a longer quorum_timeout"
            )
        if self.lighthouse is not None and len(split_addresses(self.lighthouse)) > 1 and self.allow_solo_resume:
            raise ValueError(
                "allow_solo_resume (EVERMOE_ALLOW_SOLO_RESUME) lets each part of a job continue, and lighthouse names "
                "several: expected one of the two. To let the members at one Lighthouse continue: evermoe lighthouse "
                "promote"
            )

    @property
    def trains(self) -> bool:
        """Whether this member trains, at once or as a spare that replaces a lost one."""
        return self.role != "replica"


def split_addresses(text: str) -> tuple[str, ...]:
    """Split addresses of Lighthouses at commas.

        >>> split_addresses("http://a:29510, http://b:29510")
        ('http://a:29510', 'http://b:29510')

    Raises:
        ValueError: one is no `http://host:port`, or comes twice.
    """
    found = tuple(each.strip() for each in text.split(","))
    if len(found) == 1 and found[0]:
        return found
    if not all(is_address(each) for each in found):
        raise ValueError(f"lighthouse: expected http://host:port, or several separated by commas, got {text!r}")
    if len({urlsplit(each).netloc.lower() for each in found}) < len(found):
        raise ValueError(f"lighthouse: expected each address once, got {text!r}")
    return found


def is_address(text: str) -> bool:
    """Return whether a text is `http://host:port`."""
    try:
        parts = urlsplit(text)
        is_plain = parts.path in ("", "/") and not parts.query
        return parts.scheme in ("http", "https") and bool(parts.hostname) and bool(parts.port) and is_plain
    except ValueError:
        return False
