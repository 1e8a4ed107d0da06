"""The island of a process: the group of processes that hold a model together, as FSDP2 divides it.

    torchrun  ─ RANK, WORLD_SIZE ─ init_process_group ─ init_device_mesh ─ fully_shard ─ Session(mesh=...)

An island is one torch.distributed world. Islands know of each other only as members of a session: no group of torch
crosses them, so that the loss of one leaves the others' groups as they are.

Along some dimensions of its mesh processes have different samples, and along others the same ones:

    data parallel       different samples; FSDP2 sums the gradients, the session those of all islands
    tensor parallel     the same samples; DTensors compute a part of each, and experts get a part of the tokens each
    context parallel    different tokens of the same samples
"""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from evermoe.comm.group import Group
from evermoe.comm.island import Island
from evermoe.data.sampler import Share
from evermoe.errors import UnsupportedState
from evermoe.optim.combined import each_of
from evermoe.optim.ema import is_averaged
from evermoe.session.loader_watch import LoaderWatch
from evermoe.state.deferred import Deferral
from evermoe.state.shards import TENSOR_PARALLEL, Shards, sum_gradients_of

DATA_PARALLEL = ("dp", "dp_replicate", "dp_shard", "fsdp", "batch", "replicate", "shard")
"""Names of the dimensions of a mesh along which processes have different samples."""
CONTEXT_PARALLEL = "cp"
LOST = (
    "a collective among the processes of this island has failed, as one of them is lost: without its shards none of "
    "them can continue, so this process leaves the job. The launcher, such as torchrun, starts all processes of the "
    "island again"
)
"""Message of a process that ends with its island."""


class Place(NamedTuple):
    """Part of a process in its island's batch, as the place of one of several data-parallel groups."""

    island: int = 1
    """Processes of an island."""
    group: int = 0
    """Number of the process's group; processes of a group have the same samples."""
    groups: int = 1
    """Number of groups in an island."""
    copies: int = 1
    """Tensor-parallel processes: each computes the same loss."""
    parts: int = 1
    """Context-parallel processes: each computes the loss of a part of the tokens."""
    part: int = 0
    """Number of this process among those."""
    is_counted: bool = True
    """Whether this process's part of an evaluation counts, which all processes of an island compute."""

    def of(self, rank: int, size: int) -> tuple[int, int]:
        """Return the number of the group of this process, and of all groups, among `size` members.

            >>> Place(island=4, group=1, groups=2, copies=2).of(6, 8)
            (3, 4)

        Args:
            rank: of this member.
            size: number of members that train.
        """
        return rank // self.island * self.groups + self.group, size // self.island * self.groups

    def seed_of(self, rank: int) -> int:
        """Return a number that processes with the same tokens share, and no others, for a member's rank."""
        return self.of(rank, 0)[0] * self.parts + self.part

    def share(self, sampler: LoaderWatch, step: int, group: Group) -> Share:
        """Return this process's part of the batch of a step among the members of a group."""
        found = sampler.share(step, *self.of(group.rank, group.size))
        return found if self.parts == 1 else replace(found, weight=found.weight / self.parts)


def find_island(mesh: DeviceMesh) -> Island:
    """Return the island of this process; collective among its processes.

    Args:
        mesh: all processes of the island, which are all of this torch.distributed world.

    Raises:
        ValueError: torch.distributed has other processes than the mesh.
    """
    if mesh.size() != dist.get_world_size():
        raise ValueError(
            f"mesh: expected all {dist.get_world_size()} processes of torch.distributed, as an island is started and "
            f"lost as one, got a mesh of {mesh.size()}: start each island by a launcher of its own, with its own RANK "
            "and WORLD_SIZE"
        )
    names = [uuid.uuid4().hex[:12]]
    dist.broadcast_object_list(names, src=0)
    return Island(names[0], dist.get_rank(), dist.get_world_size())


def find_place(mesh: DeviceMesh | None) -> Place:
    """Return the part of this process in its island's batch.

    Raises:
        UnsupportedState: a dimension of the mesh is none that a session knows.
    """
    if mesh is None:
        return Place()
    coordinates = mesh.get_coordinate()
    assert coordinates is not None
    names = mesh.mesh_dim_names or ("dp",) * mesh.ndim
    group, groups, others = 0, 1, {TENSOR_PARALLEL: (1, 0), CONTEXT_PARALLEL: (1, 0)}
    for name, size, coordinate in zip(names, mesh.shape, coordinates, strict=True):
        if name in DATA_PARALLEL:
            group, groups = group * size + coordinate, groups * size
        elif name in others:
            others[name] = size, coordinate
        else:
            raise UnsupportedState(
                f"mesh: the dimension {name} is none of {', '.join((*DATA_PARALLEL, *others))}. Pipelines and expert "
                "parallelism inside an island are not supported: a session spreads experts over all islands"
            )
    (copies, copy), (parts, part) = others.values()
    return Place(mesh.size(), group, groups, copies, parts, part, is_counted=group == 0 and copy == 0)


def divide(
    model: nn.Module, optimizer: torch.optim.Optimizer, island: Island, place: Place, deferral: Deferral | None
) -> Shards:
    """Return this process's parts of a model's parameters, whose gradients FSDP2 sums from now on.

    Raises:
        UnsupportedState: as of `Shards`, or the model has no values yet, or an average of its weights.
    """
    if deferral is not None:
        raise UnsupportedState(
            "mesh and a model without values: build it outside of evermoe.deferred(), and not on meta"
        )
    if any(is_averaged(each) for each in each_of(optimizer)):
        raise UnsupportedState(
            "mesh and evermoe.optim.EMA: applied() would replace the weights of experts alone, as FSDP2 gathers the "
            "others from memory of its own. Leave the EMA out"
        )
    sum_gradients_of(model)
    return Shards(model, optimizer, island, place.copies)
