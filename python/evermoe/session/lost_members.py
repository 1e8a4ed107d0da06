"""The members that are lost with each change of the group, what is left of them, and the caller of `on_lost`.

All members know the same losses, as they gather them once a group is connected. Each loss has a caller: the member
of the lowest rank with `on_lost`. Its next votes report that the call is over, and all forget the loss:

    members   b is lost   gather: b, caller a   a calls   a's vote reports it   all forget b
    a dies before that vote: the next gather has b without a caller, and c calls again, with the same `MemberLost.key`

So the hook is called once for a loss, unless its caller is lost before the vote that follows the call.

In a pipeline no group is connected before others have replaced the lost members. Members look for themselves while they
wait: the first of the last group that is left calls, and notes itself as the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from evermoe.comm.gather import gather_json
from evermoe.comm.membership import MembershipManager
from evermoe.comm.reachability import kinds_of_loss
from evermoe.comm.vote import Ballot
from evermoe.events import MemberLost
from evermoe.events.base_event import Listener
from evermoe.observe.on_lost import Hook, OnLost
from evermoe.observe.recovery_log import log_lost

KINDS = ("", "left", "process", "hung", "host")
"""Kinds of losses, from none to the worst; see `MemberLost.kind`."""
SAID = {
    "left": "has left",
    "process": "has ended, and its host lives",
    "hung": "hangs, or is stopped",
    "host": "does not answer, nor does its host",
}
"""Descriptions for messages, by `MemberLost.kind`."""
LOOK_SECONDS = 0.25
"""Time that the hosts of lost members get to answer, and that a recovery waits where one is silent: they answer at
once, or not at all."""
MAX_REPORTED = 50
"""Losses that a vote can report at a time: the bits of the integers that a float represents."""


@dataclass(frozen=True)
class Loss:
    """A loss for which `on_lost` is to be called."""

    gone: MemberLost
    last: int
    """Newest generation in which members know it."""
    caller: str = ""
    """Id of the member that calls `on_lost`."""


REMEMBERED = 64
"""Generations for which finished losses are remembered. A member that was frozen for more changes of the group brings
an older loss again, and it is called for once more."""


class LostMembers:
    """Tracks the losses of a job, the same on all members.

    Args:
        membership: connects the groups.
        hook: calls for other machines; None: this member does not call.
        wanted: members that the job was to have.
        emit: called with each loss.
    """

    def __init__(self, membership: MembershipManager, hook: str | Hook | None, wanted: int, emit: Listener) -> None:
        self._membership, self._wanted, self._emit = membership, wanted, emit
        self._hook = None if hook is None else OnLost(hook)
        self.is_leaving = False
        """Whether this member is about to leave the job. It calls for no other machine: the others may leave, too."""
        self.is_returning = False
        """Whether it leaves to come back in its other role."""
        self.leaving = self._role_switches = 0
        """Members that leave after the step, and those of them that come back in their other role: not lost."""
        self._last: tuple[int, Mapping[str, Mapping[str, Any]]] = (0, {})
        """Generation and members of the newest group whose losses are noted."""
        self._losses: list[Loss] = []
        """Losses in the same order on all members that have recorded the same group."""
        self._told: dict[str, int] = {}
        """Finished losses, by member, with the newest generation that it was in. Members that have missed the end may
        bring them again."""
        self._begun: set[str] = set()
        """Keys of the losses for which this member has begun to call."""
        self.failure = ""
        """The worst kind of the losses since `recovered`."""

    def note(self, step: int, reason: str) -> str:
        """Agree with all members of a new group on the losses, and begin to call `on_lost`; collective.

        Args:
            step: taken in this member's state.
            reason: why the last group was given up.

        Returns:
            The reason, with the names of all members that are lost.

        Raises:
            PeerLost: a member is gone; nothing has changed here.
        """
        present, generation = self._membership.members, self._membership.generation
        found = self._find(step, reason)
        mine = [asdict(each) for each in [*self._losses, *found]]
        told = self._told | {each.gone.member: each.last for each in self._losses if self._is_called(each)}
        can_call = self._hook is not None and not self.is_leaving
        said = gather_json(self._membership.everyone, [mine, told, can_call])
        losses = _merged(Loss(MemberLost(**each.pop("gone")), **each) for theirs, _, _ in said for each in theirs)
        told_by_any: dict[str, int] = {}
        for _, other, _ in said:
            told_by_any |= {member: max(last, told_by_any.get(member, 0)) for member, last in other.items()}
        callers = [member for member, (_, _, calls) in zip(present, said, strict=True) if calls]
        known = {each.gone.key for each in self._losses}
        fresh = [each for each in losses if each.gone.key not in known and each.last > told.get(each.gone.member, -1)]
        still = [each for each in losses if each.last > told_by_any.get(each.gone.member, -1)]
        self._last = generation, present
        self._losses = [_assigned(each, present, callers[0]) for each in still] if callers else []
        told = told if callers else told | {each.gone.member: each.last for each in still}
        self._told = {member: last for member, last in told.items() if last >= generation - REMEMBERED}
        self._tell(fresh)
        self._call()
        self.leaving = self._role_switches = 0
        unnamed = [each.gone for each in fresh if each.gone.member not in reason]
        names = ", ".join(f"{gone.member} {SAID[gone.kind]}" for gone in unnamed)
        return f"{reason}: {names}" if names else reason

    def look(self, step: int, reason: str) -> None:
        """Call `on_lost` for lost members of the last group, while no group can be connected as members are missing.

        A missing member is lost if it does not answer. Then the first member of that group that is left calls for it.

        Args:
            step: taken in this member's state.
            reason: why that group was given up.
        """
        if self._hook is None:
            return
        _, before = self._last
        known = {each.gone.member for each in self._losses}
        absent = {
            member: about["probe_address"]
            for member, about in before.items()
            if member not in self._membership.requests.named
        }
        silent = self._membership.reach.find_silent(
            {each: address for each, address in absent.items() if each not in known}
        )
        kinds = kinds_of_loss({member: absent[member] for member in silent}, LOOK_SECONDS)
        lost = kinds.keys() | (known & absent.keys())
        left = [member for member in before if member not in lost]
        found = self._of_group(kinds, step, reason, len(left))
        losses = _merged([*self._losses, *found])
        self._losses = [_assigned(each, dict.fromkeys(left), left[0]) for each in losses] if left else losses
        self._tell(found)
        self._call()

    def _tell(self, losses: Iterable[Loss]) -> None:
        for each in losses:
            self.failure = max(self.failure, each.gone.kind, key=KINDS.index)
            self._emit(each.gone)
            if self._membership.everyone.rank == 0:
                log_lost(each.gone)

    def _find(self, step: int, reason: str) -> list[Loss]:
        """Return the members of the last group that are not in this one."""
        _, before = self._last
        lost = {
            member: about["probe_address"] for member, about in before.items() if member not in self._membership.members
        }
        if len(lost) == self._role_switches:
            return []
        kinds = dict.fromkeys(lost, "left") if len(lost) == self.leaving else kinds_of_loss(lost, LOOK_SECONDS)
        return self._of_group(kinds, step, reason, self._membership.num_trainers)

    def _of_group(self, kinds: Mapping[str, str], step: int, reason: str, members: int) -> list[Loss]:
        """Return the losses of members of the last group, by what is left of them."""
        last, before = self._last
        return [
            Loss(
                MemberLost(
                    key=f"{member}-{last}",
                    job=self._membership.identity.job,
                    member=member,
                    node=before[member]["node"],
                    domain=before[member]["domain"],
                    role=before[member]["role"],
                    kind=kind,
                    step=step,
                    generation=self._membership.generation,
                    reason=reason,
                    members=members,
                    wanted=self._wanted,
                    attempt=1,
                ),
                last,
            )
            for member, kind in kinds.items()
        ]

    def _call(self) -> None:
        for each in self._losses:
            if self._hook is not None and each.caller == self._membership.id and each.gone.key not in self._begun:
                self._begun.add(each.gone.key)
                self._hook.call(each.gone)

    def _is_called(self, loss: Loss) -> bool:
        return self._hook is not None and self._hook.is_over(loss.gone.key)

    # ---- votes

    @property
    def reported(self) -> float:
        """Return `Ballot.reported` of this member."""
        first = self._losses[:MAX_REPORTED]
        is_mine = (each.caller == self._membership.id and self._is_called(each) for each in first)  # bits are added up
        return float(sum(2**bit for bit, is_over in enumerate(is_mine) if is_over))

    def tallied(self, sums: Ballot) -> None:
        """Note who leaves by a vote, and forget the losses for which it reports that `on_lost` was called."""
        self.leaving, self._role_switches = int(sums.leaving), int(sums.role_switches)
        bits = int(sums.reported)
        told = [each for bit, each in enumerate(self._losses) if bits >> bit & 1]
        self._told |= {each.gone.member: each.last for each in told}
        self._losses = [each for each in self._losses if each not in told]

    def recovered(self) -> str:
        """Return the worst kind of the losses since the last recovery."""
        failure, self.failure = self.failure, ""
        return failure

    def turn(self) -> str:
        """Prepare to leave and return in the other role. Return the reason why it must not; empty if it may."""
        if self._membership.role == "train" and self._membership.num_trainers == 1:
            return "no other member trains"
        self.is_returning = True
        return ""

    def close(self) -> None:
        """Wait for calls that have begun."""
        if self._hook is not None:
            self._hook.close()


def _merged(losses: Iterable[Loss]) -> list[Loss]:
    """Return one loss per member, the oldest first: of the newest generation, with the caller that any of them knows.

    If reports differ in what is left of a member, one has got an answer that the others have not.
    """
    found: dict[str, Loss] = {}
    for each in losses:
        other = found.get(each.gone.member)
        if other is None or each.last > other.last:
            found[each.gone.member] = each
        elif each.last == other.last:
            kind = min(each.gone.kind, other.gone.kind, key=KINDS.index)
            newer = max(other, each, key=lambda one: (one.gone.attempt, bool(one.caller)))
            found[each.gone.member] = replace(newer, gone=replace(newer.gone, kind=kind))
    return sorted(found.values(), key=lambda each: (each.last, each.gone.member))


def _assigned(loss: Loss, present: Mapping[str, object], caller: str) -> Loss:
    """Return the loss with a caller that is a member now."""
    if loss.caller in present:
        return loss
    attempt = loss.gone.attempt + bool(loss.caller)
    return replace(loss, caller=caller, gone=replace(loss.gone, attempt=attempt))
