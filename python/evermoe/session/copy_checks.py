"""Copies that repeat steps and differ from what their trainer has: a third member says which of the two is wrong.

    copy    its digest after a batch of steps is not the trainer's: it keeps the state before the batch, and the steps
    vote    says that there is a dispute
    then    another trainer gets both, and repeats the steps: the digest that differs from the other two is wrong

Trainers send two digests of each parameter in `PROOF_STEPS` steps, a batch apart: where the first one is right, both
had the same state before the batch. Where it is not, nobody can say when they parted, and no member is named.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from evermoe.comm.gather import gather_json, receive_bytes, send_bytes, share_json
from evermoe.comm.membership import MembershipManager
from evermoe.comm.tags import DISPUTE
from evermoe.copies.replay.dispute import Dispute, repeat_batch
from evermoe.copies.replay.replicas import Replicas
from evermoe.session.call_checks import UNREPEATABLE
from evermoe.session.finding import Finding
from evermoe.session.recorded_call import from_bytes, to_bytes
from evermoe.state.training_state import TrainingState

NUMBERS = 1
"""Numbers of a vote: members that keep a copy in dispute."""


class CopyChecks:
    """Settles disputes between copies and their trainers.

    Args:
        state: this member's units.
        membership: the members; its `trainer_group` has the first ranks of `everyone`.
        replicas: the copies on this member.
    """

    def __init__(self, state: TrainingState, membership: MembershipManager, replicas: Replicas) -> None:
        self._state, self._membership, self._replicas = state, membership, replicas

    @property
    def numbers(self) -> list[float]:
        """Numbers that this member adds to the vote."""
        return [float(self._replicas.dispute is not None)]

    def find(self, sums: Sequence[float]) -> Finding | None:
        """Return which copy differs from its trainer, by the sums of the members' `numbers`; collective if one does.

        Raises:
            PeerLost: a member is lost.
        """
        if not sums[0]:
            return None
        everyone, mine = self._membership.everyone, self._replicas.dispute
        said_R = gather_json(everyone, None if mine is None else _about(*mine))
        keeper, (trainer, unit, part, step, of_trainer, own, is_complete) = next(
            (rank, said) for rank, said in enumerate(said_R) if said is not None
        )
        ranks = [rank for rank in range(self._membership.num_trainers) if rank not in (keeper, trainer)]
        named: list[int] = []
        if ranks and is_complete:
            dispute = mine[1] if mine is not None and everyone.rank == keeper else None
            repeated = self._repeat_at(ranks[0], keeper, dispute, unit, part)
            named = {of_trainer: [keeper], own: [trainer]}.get(repeated, [])
        return Finding([f"the state of {part} after step {step - 1}, which a copy repeats"], [unit], named, "copy")

    def _repeat_at(self, rank: int, keeper: int, dispute: Dispute | None, unit: str, part: str) -> int | None:
        """Let a member repeat the steps that the keeper has sent; return its digest; collective."""
        everyone, found = self._membership.everyone, None
        if dispute is not None and dispute.batch is not None:
            send_bytes(everyone, to_bytes(dispute.batch.record()), rank, DISPUTE)
        elif everyone.rank == rank:
            message = receive_bytes(everyone, keeper, DISPUTE)
            with suppress(*UNREPEATABLE):  # a check must not end the job
                record = from_bytes(message, torch.device("cpu"))
                found = repeat_batch(self._state.catalog.by_name[unit], part, record)
        repeated: int | None = share_json(everyone, found, rank)
        return repeated

    def end(self, leaving: Sequence[int] = ()) -> None:
        """Let the copies in dispute on this member take the trainers' states, but not of ranks that leave as wrong."""
        self._replicas.end_disputes(leaving)


def _about(trainer: int, dispute: Dispute) -> list[object]:
    """Return what all members must know of a dispute."""
    is_complete = dispute.batch is not None
    return [trainer, dispute.unit, dispute.part, dispute.step, dispute.of_trainer, dispute.own, is_complete]
