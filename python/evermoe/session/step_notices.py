"""Notices that a step begins, from rank 0 to replica nodes.

Those that train may work between two steps for any time: evaluate, save, wait for one of them that works alone. Replica
nodes take no part in that. They wait for the notice without a limit, and from then on for `hang_timeout`, as in any
step. The death of a member ends either wait.
"""

from __future__ import annotations

import torch

from evermoe.comm.membership import MembershipManager
from evermoe.comm.tags import STEP
from evermoe.session.purposes import UNLIMITED


def send(membership: MembershipManager, number: int) -> None:
    """Notify replica nodes of a step, without a wait for them; for all members that train to call."""
    everyone, trainers = membership.everyone, membership.num_trainers
    if everyone.rank == 0 and everyone.size > trainers:
        everyone.post(torch.tensor([number]), range(trainers, everyone.size), STEP)


def wait(membership: MembershipManager) -> None:
    """Wait for the next step, on a replica node.

    Raises:
        PeerLost: a member is gone.
    """
    membership.everyone.exchange([], [(torch.zeros(1, dtype=torch.int64), 0)], STEP, UNLIMITED)
