"""Messages that members exchange through the Lighthouse, and the handling of other processes' messages.

`src/protocol/message.rs` defines the schema. Any process that reaches the Lighthouse can send it anything. Content that
is not a message of a member is ignored, with one warning for each sender.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from evermoe import _native
from evermoe.comm.gathering import Gathering
from evermoe.comm.quarantine import Quarantine, Quarantines, against, merged
from evermoe.errors import UnfitNode

logger = logging.getLogger(__name__)

SECRET_VARIABLE = "EVERMOE_SECRET"
"""Environment variable of the job's secret. It is not an option, so that no script and no output contains it."""
MAX_WARNED = 1000
"""Largest number of senders for which the warning is remembered."""


def job_secret() -> _native.Secret | None:
    """Return the job's secret, if the environment has one."""
    text = os.environ.get(SECRET_VARIABLE)
    return _native.Secret(text) if text else None


@dataclass(frozen=True)
class MemberReport:
    """A member's message, after its checks."""

    id: str
    job: str
    data: dict[str, Any]
    """The fields of `Message` in `src/protocol/message.rs`."""

    @property
    def established(self) -> bool:
        """Whether the member has state of the running job."""
        return self.data["standing"]["established"]


class Other(NamedTuple):
    """A member of this job with another version of the protocol."""

    id: str
    established: bool
    protocol: int


@dataclass(frozen=True)
class Identity:
    """Properties that all members of a job share; processes that differ cannot join."""

    job: str
    layout: str
    """Digest of the model's and optimizer's units."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Options, data, classes and versions that must be the same on all members, as text by name."""
    arithmetic: str = ""
    """Rounding with which replicas repeat this member's steps; empty if it sends no gradients, as on a replica node."""

    def differences(self, other: MemberReport) -> str:
        """Return the differences from another member of the same job and layout as text; empty if there are none."""
        theirs, here = other.data["options"] | {"arithmetic": other.data["arithmetic"]}, {**self.options}
        if self.arithmetic and other.data["arithmetic"]:
            here["arithmetic"] = self.arithmetic
        else:
            theirs.pop("arithmetic")
        names = [name for name in {**here, **theirs} if here.get(name) != theirs.get(name)]
        return "; ".join(
            f"{name} is {here.get(name, 'missing')} here, {theirs.get(name, 'missing')} on the other worker"
            for name in names
        )

    def reason_against(self, other: MemberReport) -> str:
        """Return the reason why a member does not belong to the same job; empty if it does."""
        if self.job != other.job:
            return f"it belongs to job {other.job!r}, not to {self.job!r}"
        if self.layout != other.data["layout"]:
            return "its model or optimizer differs: the units have other names, shapes or types"
        return self.differences(other)

    def is_same(self, other: MemberReport) -> bool:
        """Return whether a member belongs to the same job."""
        return (self.job, self.layout) == (other.job, other.data["layout"]) and not self.differences(other)


class Decoded(NamedTuple):
    """Content of a set of the Lighthouse."""

    reports: list[MemberReport]
    """Members of any job that share this member's secret."""
    others: list[Other]
    """Members of this job with another version of the protocol."""
    secretless: dict[str, str]
    """Processes that claim to be of this job but do not have its secret: the difference, by id."""
    lifted: list[str]
    """Names of quarantines of this job that operators lift."""


class Messages:
    """Writes this member's messages and reads the others'.

    Args:
        id: this member's id.
        identity: properties that members of the job share.
        lighthouse: address of the Lighthouse, for errors.
        secret: the job's, if it has one.
        hardware: of this member, as in `Quarantine`.
    """

    def __init__(
        self, id: str, identity: Identity, lighthouse: str, secret: _native.Secret | None, hardware: str = ""
    ) -> None:
        self._id, self.identity, self._lighthouse, self._secret = id, identity, lighthouse, secret
        self.hardware, self.quarantines = hardware, Quarantines()
        self._warned: set[str] = set()
        self.is_promoted = False
        """Whether an operator has promoted the members of the latest set to resume although others may be missing."""
        self.refused: dict[str, Any] | None = None
        """The latest set, as in `Refused` of `src/protocol/event.rs`, if it is inconsistent and `names_this_member`."""
        self._ended_by_own_name: set[str] = set()
        """Members reported as ended in the latest set under their own names: see `write_ended`."""
        self._ended_by_other_name: set[str] = set()
        """Members reported as ended in the latest set under the other name."""
        self.gathering = Gathering()
        """Members and refusals of the current agreement."""

    def write_message(self, message: dict[str, Any]) -> dict[str, Any]:
        """Encode this member's message for the Lighthouse.

        Args:
            message: the fields of `Message` in `src/protocol/message.rs`, without those of the identity, and of the
                quarantines.
        """
        message = message | {"hardware": self.hardware, "quarantined": self.quarantines.fields()}
        shared = {name: getattr(self.identity, name) for name in ("layout", "arithmetic")}
        shared["options"] = dict(self.identity.options)
        return json.loads(_native.encode_message(self._id, self.identity.job, shared | message, self._secret))

    def write_ended(self, member: str) -> dict[str, dict[str, Any]]:
        """Return the reports that a member's process has ended, by the names under which they are sent.

        One is sent under the member's own name, one under another name. The other name changes the number of the set;
        otherwise a live member that was wrongly reported might take that set for one with its own request.
        """
        job = self.identity.job
        names = [f"ended-{member}", member]
        return {name: json.loads(_native.encode_ended(name, job, member, self._secret)) for name in names}

    def read_members(
        self, members: Iterable[Any], *, is_established: bool, steps: int = 0, needed: int = 1
    ) -> list[MemberReport]:
        """Return the members of this job, sorted by id.

        The job is that of the established members, or else that of the majority.

        Args:
            members: torchft's participants, with `replica_id` and `data`.
            is_established: whether this member has state of the running job; if so, members that differ are refused.
            steps: steps after which this member's script ends the job; 0 for no limit.
            needed: number of training members for which a new job waits.

        Raises:
            ValueError: the Lighthouse serves another job, or the job has another model or other options.
            UnfitNode: the job admits no newcomers on this member's hardware.
            ConnectionError: processes with this job's name and another secret may be the job; request again.
        """
        reports, others, secretless, lifted = self._decode(sorted(members, key=lambda member: member.replica_id))
        if reports and not is_established:
            self._check_same_secret(reports, secretless)
            self._check_same_protocol(reports, others)
            self._check_same_job(_reference(reports, needed), steps)
        mine = [member for member in reports if self.identity.is_same(member)]
        for each in reports:
            if each not in mine:
                self._refuse(each.id, self.identity.reason_against(each))
        quarantines = merged((each.data["quarantined"] for each in mine if each.established), lifted)
        self.quarantines.merge(quarantines)
        for each in mine.copy():
            found = None if each.established else against(each.data["hardware"], quarantines)
            if found is not None:
                if each.id == self._id:
                    self._leave_quarantined(found)
                self._refuse(each.id, f"quarantine: it is on {found}")
                mine.remove(each)
        if not mine:
            return []
        reference = _reference(mine, 0)  # a trainer, which has an arithmetic: all members refuse the same ones
        shared = (reference.data[key] for key in ("layout", "options", "arithmetic"))
        identity = Identity(reference.job, *shared)
        return [member for member in mine if identity.is_same(member)]

    def problem(self, members: list[MemberReport], group: Collection[str] = ()) -> str:
        """Return the reason why the latest set is inconsistent; empty if it is consistent.

        Args:
            members: this job's members in it, from `read_members`.
            group: ids of this member's latest group. If some of it are reported, the set must name all the rest.
        """
        alive = {each.id for each in members}
        if self._id not in alive:
            if self.is_reported_ended:
                return "other members report that this member's process has ended"
            return "the Lighthouse passes on a message that differs from this member's"
        doubtful = sorted((self._ended_by_own_name - self._ended_by_other_name) | (self._ended_by_other_name & alive))
        if doubtful:
            return f"members disagree on whether {doubtful[0]} has ended"
        missing = sorted(set(group) - alive - self._ended_by_own_name)
        if self._ended_by_own_name and missing:
            return f"{missing[0]} sent no request, and other members are reported as ended"
        return ""

    @property
    def is_reported_ended(self) -> bool:
        """Whether others report in the latest set that this member's process has ended."""
        return self._id in self._ended_by_own_name

    def names_this_member(self, members: list[MemberReport]) -> bool:
        """Return whether the latest set contains this member, and no report that it has ended."""
        return self._id in {each.id for each in members} and self._id not in self._ended_by_other_name

    def _decode(self, members: list[Any]) -> Decoded:
        found = Decoded([], [], {}, [])
        promoted: set[int | None] = set()
        self._ended_by_own_name, self._ended_by_other_name = set(), set()
        for each in members:
            decoded = json.loads(_native.decode_message(each.replica_id, as_text(each.data), self._secret))
            if decoded["kind"] == "member":
                found.reports.append(MemberReport(each.replica_id, decoded["job"], decoded["message"]))
                continue
            if decoded["kind"] == "promotion":
                if decoded["job"] == self.identity.job:
                    promoted.add(decoded["generation"])
                continue
            if decoded["kind"] == "ended":
                if decoded["job"] == self.identity.job:
                    is_own_name = each.replica_id == decoded["member"]
                    (self._ended_by_own_name if is_own_name else self._ended_by_other_name).add(decoded["member"])
                continue
            if decoded["kind"] == "lift":
                if decoded["job"] == self.identity.job and decoded["name"]:
                    found.lifted.append(decoded["name"])
                continue
            if decoded["kind"] == "stranger":
                self._warn(each.replica_id, f"its content is not a message of a member: {decoded['why']}")
                continue
            if decoded["kind"] == "other_secret":
                self._refuse(each.replica_id, decoded["why"])
                if decoded["job"] == self.identity.job:
                    found.secretless[each.replica_id] = decoded["why"]
                continue
            protocol = decoded["protocol"]
            self._refuse(each.replica_id, f"it speaks protocol {protocol}, this member {_native.PROTOCOL}")
            if decoded["job"] == self.identity.job:
                found.others.append(Other(each.replica_id, decoded["established"], protocol))
        own = [each.data["standing"]["generation"] for each in found.reports if each.job == self.identity.job]
        self.is_promoted = max(own, default=0) in promoted
        return found

    def _leave_quarantined(self, found: Quarantine) -> NoReturn:
        raise UnfitNode(
            f"job {self.identity.job!r} admits no newcomer on {found}. Repair, reset or replace it, or start this "
            f"worker elsewhere. To admit it again: evermoe lighthouse quarantine {self._lighthouse.split(',')[0]} "
            f"--job {self.identity.job} --lift {found.hardware}",
            found.hardware,
        )

    def _refuse(self, sender: str, why: str) -> None:
        self.gathering.note_refusal(sender, why)
        self._warn(sender, why)

    def _warn(self, sender: str, why: str) -> None:
        if sender not in self._warned and len(self._warned) < MAX_WARNED:
            self._warned.add(sender)
            logger.warning("ignoring %r at the Lighthouse: %s", sender, why)

    def _check_same_secret(self, reports: list[MemberReport], secretless: dict[str, str]) -> None:
        """Check that an established member, or a majority, shares this member's secret.

        Otherwise this member might start the job a second time while the others run it. They may not belong to the job,
        so this is no fatal error: the member requests again until the agreement's time limit.
        """
        same = [each for each in reports if each.job == self.identity.job]
        if len(secretless) < len(same) or any(each.established for each in same):
            self.gathering.doubt = "" if secretless else self.gathering.doubt
        elif secretless:
            each, why = min(secretless.items())
            self.gathering.doubt = f"{each} claims to be of job {self.identity.job!r}, but {why}"
            raise ConnectionError(self.gathering.doubt)

    def _check_same_protocol(self, reports: list[MemberReport], others: list[Other]) -> None:
        same: list[MemberReport | Other] = [each for each in reports if each.job == self.identity.job]
        first = min([*same, *others], key=_rank)
        for other in others:
            if other is first:
                raise ValueError(
                    f"this worker's evermoe speaks protocol {_native.PROTOCOL} and that of {other.id} in job "
                    f"{self.identity.job!r} protocol {other.protocol}: install the same evermoe on all machines"
                )

    def _check_same_job(self, first: MemberReport, steps: int) -> None:
        if first.job != self.identity.job:
            raise ValueError(
                f"the Lighthouse {self._lighthouse} serves job {first.job!r}, this worker belongs to job "
                f"{self.identity.job!r}: start one Lighthouse for each job"
            )
        if first.data["layout"] != self.identity.layout:
            raise ValueError(
                f"this worker's model or optimizer differs from that of {first.id} in job {first.job!r}: their units "
                "have other names, shapes or types. Start it with the same script and options as the others."
            )
        differences = self.identity.differences(first)
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
    """Return a process's message as JSON text; empty if it is nested too deeply."""
    try:
        return json.dumps(data)
    except RecursionError:
        return ""


def _rank(member: MemberReport | Other) -> tuple[bool, str]:
    return not member.established, member.id


def _reference(reports: list[MemberReport], needed: int) -> MemberReport:
    """Return the member that others are compared with: preferably established, then a trainer, then of the majority.

    Raises:
        ConnectionError: members of a new job are still missing, and two kinds of members are equally many.
    """

    def rank(each: MemberReport) -> tuple[bool, bool]:
        return not each.established, each.data["role"] != "train"

    def kind(each: MemberReport) -> str:
        return json.dumps([each.job, *(each.data[key] for key in ("layout", "options", "steps"))], sort_keys=True)

    first = [each for each in reports if rank(each) == min(map(rank, reports))]
    kinds = Counter(map(kind, first)).most_common(2)
    if len(first) < needed and not first[0].established and len({count for _, count in kinds}) < len(kinds):
        raise ConnectionError(
            "the members of this new job differ, and no kind has a majority yet: the missing members decide"
        )
    return max(first, key=lambda each: kind(each) == kinds[0][0])


def participant(name: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a member's message that the protocol uses."""
    return {
        "id": name,
        "rank_key": data["rank_key"],
        "island": data["island"],
        "trains": data["role"] == "train",
        "waits": data["waits"],
        "is_patient": data["patience"] > 0,
        "unreachable": data["unreachable"],
        "standing": data["standing"],
    }
