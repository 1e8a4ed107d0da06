"""Options of a member: which job it belongs to, and how long it waits for others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from evermoe.comm.transport import Carrier
from evermoe.config.membership import split_addresses
from evermoe.options import MAX_SECONDS, MIN_SECONDS, Options, check_name, option

Role = Literal["train", "replica"]


@dataclass(frozen=True, kw_only=True)
class MembershipOptions(Options):
    """Which job a member belongs to, and how long it waits for others."""

    lighthouse: str | None = None
    """Address of the job's Lighthouse, `http://host:port` (EVERMOE_LIGHTHOUSE, or TORCHFT_LIGHTHOUSE). Several,
    separated by commas: members ask the first that answers, and only a majority goes on after a failure. None: a job
    of this process alone."""
    job: str | None = option(None, is_name=True)
    """Name that the job's shared memory goes by (EVERMOE_JOB; with a Lighthouse JOB_ID, SLURM's or torchrun's; default:
    a name that no other process finds)."""
    node: str | None = option(None, is_name=True)
    """The machine whose memory dies as one (EVERMOE_NODE; default: the host's name)."""
    domain: str | None = None
    """What fails with this node, from the largest to the smallest, such as `zone-a/rack-3`: copies are spread over the
    largest of which there are enough (EVERMOE_DOMAIN; srun's SLURM_TOPOLOGY_ADDR; default: the node alone)."""
    address: str | None = None
    """Name or address by which other members reach this process, and on which it listens (EVERMOE_ADDRESS; default:
    loopback if the Lighthouse's address is, else the host's name, listening on all addresses; where that name does not
    resolve, the address on the way to the Lighthouse)."""
    members: int | None = option(None, least=1)
    """Members that a new job waits for (EVERMOE_MEMBERS; with a Lighthouse WORLD_SIZE or srun's tasks; default 1).
    Later ones join at any time."""
    allow_solo_resume: bool = False
    """Resume instead of raising `LeftBehind` when no newer member survives (EVERMOE_ALLOW_SOLO_RESUME=1)."""
    role: Role = "train"
    """`replica`: this process keeps copies for the others and does not train (EVERMOE_ROLE)."""
    spare: bool = False
    """Trains only once fewer than `members` do, and takes a lost one's place in the recovery that the loss begins
    (EVERMOE_SPARE=1). To a new job others may come for `hang_timeout` before it makes up their number."""
    heartbeat_timeout: float = option(2.0, least=MIN_SECONDS, most=MAX_SECONDS)
    """Seconds after which a member whose process is stopped, whose host is gone or which is cut off counts as lost."""
    hang_timeout: float = option(30.0, least=MIN_SECONDS, most=MAX_SECONDS)
    """Seconds that a collective waits for a silent peer. Longer than the longest difference between members' steps
    and than a checkpoint takes to write."""
    quorum_timeout: float = option(300.0, least=MIN_SECONDS, most=MAX_SECONDS)
    """Seconds that agreement on the members may take, the Lighthouse being away included."""
    rejoin_timeout: float = option(30.0, least=0, most=MAX_SECONDS)
    """Seconds that missing units are waited for before they count as lost: their holders may be on their way back."""
    drain_timeout: float = option(30.0, least=0, most=MAX_SECONDS)
    """Seconds from SIGTERM, SIGUSR1 or SIGUSR2 until this process ends though its step is not over. 0: evermoe listens
    to none of them."""
    transport: Carrier = option("tcp", shared=True)
    """Carries the bytes of copies and of recoveries between members' memories. `ucx`: by UCX, which uses RDMA where the
    network and its library have it; the library is found by its name, in the package libucx-cu12, or at EVERMOE_UCX."""
    join_interval: int = option(5, shared=True, least=1)
    """Steps between looks for new members, which no step waits for."""
    join_wait: float = option(0.0, shared=True, least=0, most=MAX_SECONDS)
    """Seconds from when members hear of a newcomer until they take it in, with all that have come meanwhile: one
    interruption for all. A recovery after a loss takes in at once who has come. Shorter than `quorum_timeout`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in self.domain.split("/") if self.domain is not None else ():
            check_name("each part of domain (EVERMOE_DOMAIN), between slashes,", part)
        if self.spare and (self.role != "train" or self.lighthouse is None):
            raise ValueError(
                "spare (EVERMOE_SPARE): expected role='train' and the lighthouse of a job, got "
                f"role={self.role!r}, lighthouse={self.lighthouse!r}"
            )
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
