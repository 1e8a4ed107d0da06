"""What members tell each other through the Lighthouse, and what becomes of what strangers tell it.

The schema is `src/protocol/message.rs`. Whoever reaches the Lighthouse can tell it anything: what is not a message of
a member is ignored, with one warning.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from evermoe import _native
from evermoe.comm.gathering import Gathering

logger = logging.getLogger(__name__)

SECRET_VARIABLE = "EVERMOE_SECRET"
"""Environment variable of the job's secret: no option, so that it is in no script and in nothing that is printed."""
MAX_WARNED = 1000
"""Senders that are remembered as warned about."""


def job_secret() -> _native.Secret | None:
    """The job's secret, if the environment has one."""
    text = os.environ.get(SECRET_VARIABLE)
    return _native.Secret(text) if text else None


@dataclass(frozen=True)
class Told:
    """What a member has told, checked."""

    id: str
    job: str
    data: dict[str, Any]
    """The fields of `Message` in `src/protocol/message.rs`."""

    @property
    def established(self) -> bool:
        """Whether it has state of the running job."""
        return self.data["standing"]["established"]


class Other(NamedTuple):
    """A member of this job that speaks another protocol."""

    id: str
    established: bool
    protocol: int


@dataclass(frozen=True)
class Identity:
    """What members of one job have in common; others may not join it."""

    job: str
    layout: str
    """Digest of the model's and optimizer's units."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options, data, classes and versions that must be the same for all, as text by name."""
    arithmetic: str = ""
    """How replicas repeat this member's steps; empty where it sends no gradients, as on a replica node."""

    def differences(self, other: Told) -> str:
        """What differs from another member of the same job and layout, one after the other; empty for none."""
        theirs, here = other.data["options"] | {"arithmetic": other.data["arithmetic"]}, {**self.options}
        if self.arithmetic and other.data["arithmetic"]:
            here["arithmetic"] = self.arithmetic
        else:
            theirs.pop("arithmetic")
        names = [name for name in {**here, **theirs} if here.get(name) != theirs.get(name)]
        return "; ".join(
            f"{name} is {here.get(name, 'missing')} here, {theirs.get(name, 'missing')} there" for name in names
        )

    def reason_against(self, other: Told) -> str:
        """The reason why the member that has told this is not of the same job."""
        if self.job != other.job:
            return f"it belongs to job {other.job!r}, not to {self.job!r}"
        if self.layout != other.data["layout"]:
            return "its model or optimizer differs: the units have other names, shapes or types"
        return self.differences(other)

    def is_same(self, other: Told) -> bool:
        """Whether the member that has told this belongs to the same job."""
        return (self.job, self.layout) == (other.job, other.data["layout"]) and not self.differences(other)


class Heard(NamedTuple):
    """What a set of the Lighthouse holds."""

    told: list[Told]
    """Members of any job, whose secret is this member's."""
    others: list[Other]
    """Members of this job that speak another protocol."""
    secretless: dict[str, str]
    """Those that say to be of this job and do not have its secret: by id, how they differ."""


class Messages:
    """Writes this member's messages and reads the others'.

    Args:
        id: this member's.
        identity: what this member must have in common with the others of its job.
        lighthouse: its address, for errors.
        secret: the job's, if it has one.
    """

    def __init__(self, id: str, identity: Identity, lighthouse: str, secret: _native.Secret | None) -> None:
        self._id, self._identity, self._lighthouse, self._secret = id, identity, lighthouse, secret
        self._warned: set[str] = set()
        self.is_promoted = False
        """Whether an operator has said, in the latest set, that its members go on though others may be missing."""
        self.refused: int | None = None
        """Number of the set that the latest question was answered with, if it is not to be believed and `names` this
        member."""
        self._spoken_for: set[str] = set()
        """Members for which others speak in the latest set, under their names: see `write_ended`."""
        self._announced: set[str] = set()
        """Those for which they speak there under the other one."""
        self.gathering = Gathering()
        """Who has come, and who was refused, in this agreement."""

    def write(self, message: dict[str, Any]) -> dict[str, Any]:
        """What the Lighthouse is told.

        Args:
            message: the fields of `Message` in `src/protocol/message.rs`, without those of the identity.
        """
        shared = {name: getattr(self._identity, name) for name in ("layout", "arithmetic")}
        shared["options"] = dict(self._identity.options)
        text = json.dumps(shared | message)
        return json.loads(_native.encode_message(self._id, self._identity.job, text, self._secret))

    def write_ended(self, member: str) -> dict[str, dict[str, Any]]:
        """What the Lighthouse is told when a member's process has ended, by the names under which it is told.

        It is told so under another name than the member's, too, as then its set gets another number: else a member that
        was wrongly taken for dead might believe that it was in that set.
        """
        job = self._identity.job
        names = [f"ended-{member}", member]
        return {name: json.loads(_native.encode_ended(name, job, member, self._secret)) for name in names}

    def read(self, members: Iterable[Any], *, is_established: bool, steps: int = 0, needed: int = 1) -> list[Told]:
        """The members of this job by id: of the established ones' job, or else of most members'.

        Args:
            members: with `replica_id` and `data`, as torchft has them.
            is_established: whether this member has state of the running job; it is then right, and others differ.
            steps: steps after which its script ends the job; 0 where no script does.
            needed: members that train, for which a new job waits.

        Raises:
            ValueError: the Lighthouse serves another job, or the job trains another model or with other options.
            ConnectionError: those with this job's name and without its secret may be right; ask again.
        """
        told, others, secretless = self._hear(sorted(members, key=lambda member: member.replica_id))
        if told and not is_established:
            self._check_same_secret(told, secretless)
            self._check_same_protocol(told, others)
            self._check_same_job(_reference(told, needed), steps)
        mine = [member for member in told if self._identity.is_same(member)]
        for each in told:
            if each not in mine:
                self._turn_away(each.id, self._identity.reason_against(each))
        if not mine:
            return []
        reference = _reference(
            mine, 0
        )  # has an arithmetic, as trainers have, so that all members leave out the same ones
        shared = (reference.data[key] for key in ("layout", "options", "arithmetic"))
        identity = Identity(reference.job, *shared)
        return [member for member in mine if identity.is_same(member)]

    def problem(self, told: list[Told], group: Collection[str] = ()) -> str:
        """Why the latest set is not to be believed, of which these are this job's members; empty if it is.

        Args:
            told: from `read`.
            group: this member's last one: who goes on as others are spoken for has heard of all of it.
        """
        alive = {each.id for each in told}
        if self._id not in alive:
            if self.is_spoken_for:
                return "others say that this member's process has ended"
            return "the Lighthouse passes on another message than this member has told"
        doubtful = sorted((self._spoken_for - self._announced) | (self._announced & alive))
        if doubtful:
            return f"members differ on whether {doubtful[0]} has ended"
        missing = sorted(set(group) - alive - self._spoken_for)
        if self._spoken_for and missing:
            return f"{missing[0]} has not asked, and others are spoken for"
        return ""

    @property
    def is_spoken_for(self) -> bool:
        """Whether others say in the latest set that this member's process has ended."""
        return self._id in self._spoken_for

    def names(self, told: list[Told]) -> bool:
        """Whether the latest set has this member, and nobody who says that it has ended."""
        return self._id in {each.id for each in told} and self._id not in self._announced

    def _hear(self, members: list[Any]) -> Heard:
        found = Heard([], [], {})
        promoted: set[int | None] = set()
        self._spoken_for, self._announced = set(), set()
        for each in members:
            heard = json.loads(_native.decode_message(each.replica_id, as_text(each.data), self._secret))
            if heard["kind"] == "member":
                found.told.append(Told(each.replica_id, heard["job"], heard["message"]))
                continue
            if heard["kind"] == "promotion":
                if heard["job"] == self._identity.job:
                    promoted.add(heard["generation"])
                continue
            if heard["kind"] == "ended":
                if heard["job"] == self._identity.job:
                    is_own_name = each.replica_id == heard["member"]
                    (self._spoken_for if is_own_name else self._announced).add(heard["member"])
                continue
            if heard["kind"] == "stranger":
                self._warn(each.replica_id, f"what it tells is no message of a member: {heard['why']}")
                continue
            if heard["kind"] == "other_secret":
                self._turn_away(each.replica_id, heard["why"])
                if heard["job"] == self._identity.job:
                    found.secretless[each.replica_id] = heard["why"]
                continue
            protocol = heard["protocol"]
            self._turn_away(each.replica_id, f"it speaks protocol {protocol}, this member {_native.PROTOCOL}")
            if heard["job"] == self._identity.job:
                found.others.append(Other(each.replica_id, heard["established"], protocol))
        own = [each.data["standing"]["generation"] for each in found.told if each.job == self._identity.job]
        self.is_promoted = max(own, default=0) in promoted
        return found

    def _turn_away(self, sender: str, why: str) -> None:
        self.gathering.refuse(sender, why)
        self._warn(sender, why)

    def _warn(self, sender: str, why: str) -> None:
        if sender not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(sender)
            logger.warning("ignoring %r at the Lighthouse: %s", sender, why)

    def _check_same_secret(self, told: list[Told], secretless: dict[str, str]) -> None:
        """Lets a member go on with an established one, or where more agree with it on the secret than do not.

        Else it might start the job anew beside those that run it. They may be strangers, so this is no error yet: it
        asks again, as long as an agreement may take.
        """
        same = [each for each in told if each.job == self._identity.job]
        if len(secretless) < len(same) or any(each.established for each in same):
            self.gathering.doubt = "" if secretless else self.gathering.doubt
        elif secretless:
            each, why = min(secretless.items())
            self.gathering.doubt = f"{each} says to be of job {self._identity.job!r}, but {why}"
            raise ConnectionError(self.gathering.doubt)

    def _check_same_protocol(self, told: list[Told], others: list[Other]) -> None:
        same: list[Told | Other] = [each for each in told if each.job == self._identity.job]
        first = min([*same, *others], key=_rank)
        for other in others:
            if other is first:
                raise ValueError(
                    f"this worker's evermoe speaks protocol {_native.PROTOCOL} and that of {other.id} in job "
                    f"{self._identity.job!r} protocol {other.protocol}: install the same evermoe on all machines"
                )

    def _check_same_job(self, first: Told, steps: int) -> None:
        if first.job != self._identity.job:
            raise ValueError(
                f"the Lighthouse {self._lighthouse} serves job {first.job!r}, this worker belongs to job "
                f"{self._identity.job!r}: start one Lighthouse for each job"
            )
        if first.data["layout"] != self._identity.layout:
            raise ValueError(
                f"this worker's model or optimizer differs from that of {first.id} in job {first.job!r}: their units "
                "have other names, shapes or types. Start it with the same script and options as the others."
            )
        differences = self._identity.differences(first)
        if differences:
            raise ValueError(
                f"this worker differs from {first.id} in job {first.job!r}: {differences}. Start it with the same "
                "script, options and versions as the others."
            )
        if steps and first.data["steps"] not in (0, steps):
            raise ValueError(
                f"this worker's loop is session.steps({steps}), that of {first.id} in job {first.job!r} is "
                f"session.steps({first.data['steps']}): all workers' must be the same"
            )


def as_text(data: Any) -> str:
    """What somebody tells, as JSON again; nothing where it is too deep for that."""
    try:
        return json.dumps(data)
    except RecursionError:
        return ""


def _rank(member: Told | Other) -> tuple[bool, str]:
    return not member.established, member.id


def _reference(told: list[Told], needed: int) -> Told:
    """The member that others are compared with: an established one rather than another, a trainer, one of most.

    Raises:
        ConnectionError: of a new job's members not all have come, and as many are of one kind as of another.
    """

    def rank(each: Told) -> tuple[bool, bool]:
        return not each.established, each.data["role"] != "train"

    def kind(each: Told) -> str:
        return json.dumps([each.job, *(each.data[key] for key in ("layout", "options", "steps"))], sort_keys=True)

    first = [each for each in told if rank(each) == min(map(rank, told))]
    kinds = Counter(map(kind, first)).most_common(2)
    if len(first) < needed and not first[0].established and len({count for _, count in kinds}) < len(kinds):
        raise ConnectionError("the members of this new job differ: those that are to come decide which are right")
    return max(first, key=lambda each: kind(each) == kinds[0][0])


def participant(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """What the protocol judges of a member's message."""
    return {
        "id": name,
        "rank_key": data["rank_key"],
        "trains": data["role"] == "train",
        "waits": data["waits"],
        "is_patient": data["patience"] > 0,
        "unreachable": data["unreachable"],
        "standing": data["standing"],
    }
