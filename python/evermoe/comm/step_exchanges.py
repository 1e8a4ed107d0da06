"""Exchanges of a step's forward and backward, after which a step that has lost a member may run to its end.

With `Group.finishes_steps` they return zeros once a member is lost, and raise nothing. So the forwards and backwards of
the step, and all other collectives in them, are the same as without the loss. That matters where the script's process
belongs to a second group, such as FSDP2's: if one process left the step, the others of that group would wait for it in
their next collective.

The group stays broken. The members do not vote on the step, and repeat it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from evermoe.comm.group import Group
from evermoe.errors import PeerLost


def all_gather(tensor: Tensor, group: Group) -> Tensor:
    """Return the tensor of each member as `Group.all_gather` does; after a loss, zeros for all other members."""
    try:
        return group.all_gather(tensor)
    except PeerLost:
        if not group.finishes_steps:
            raise
    gathered = tensor.new_zeros((group.size, *tensor.shape))
    gathered[group.rank] = tensor
    return gathered


def all_to_all(rows: Tensor, sent_R: list[int], received_R: list[int], group: Group) -> Tensor:
    """Exchange rows as `Group.all_to_all` does; after a loss, return zeros."""
    try:
        return group.all_to_all(rows, sent_R, received_R)
    except PeerLost:
        if not group.finishes_steps:
            raise
    return rows.new_zeros((sum(received_R), *rows.shape[1:]))


def all_reduce(values: Tensor, group: Group) -> Tensor:
    """Return the sum of `values` over all members, in new memory; after a loss, zeros."""
    try:
        return group.all_reduce(values.clone(memory_format=torch.contiguous_format))
    except PeerLost:
        if not group.finishes_steps:
            raise
    return torch.zeros_like(values, memory_format=torch.contiguous_format)
