"""Shards of an island's tensors, as plain parameters, and the units that they are at each position.

An island is a group of processes that hold a model together, as FSDP2 and tensor parallelism divide it; each has a
position in it. Processes of one position in different islands hold the same shards:

    island a   position 0: block@0of2    position 1: block@1of2
    island b   position 0: block@0of2    position 1: block@1of2

The session steps plain parameters that share the memory of the local shards, never the DTensors: so any elementwise
optimizer works, and a unit's bytes are those of its tensors. What is replicated inside an island is a unit without a
position, which all members hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evermoe.comm.island import Island
from evermoe.errors import UnsupportedState
from evermoe.moe.experts import Experts
from evermoe.moe.token_parts import DividedTokens
from evermoe.optim.combined import each_of
from evermoe.state.extent import Extent
from evermoe.state.unit import Unit, shard_unit

TENSOR_PARALLEL = "tp"
"""Name of a mesh's dimension along which processes have the same samples."""


class Shard(NamedTuple):
    """A parameter of which each process of an island has a part."""

    dtensor: Any
    """The DTensor of the model."""
    local: nn.Parameter
    """This process's part, in the same memory."""


class Shards:
    """This process's parts of a model's DTensors.

    The optimizers step these parts from now on: they replace the DTensors in `param_groups`.

    Args:
        model: whose parameters `fully_shard` or `distribute_tensor` may have divided over the island.
        optimizer: over its parameters, before the first step.
        island: of this process.
        equal: processes that have the same samples, as tensor-parallel ones do.

    Raises:
        UnsupportedState: the optimizer has stepped already, a tensor is a partial sum, or an expert is divided.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, island: Island, equal: int = 1) -> None:
        self.island, self._equal = island, equal
        self._modules = fsdp_modules(model)
        self._shards = [
            _shard(name, each, island, equal) for name, each in model.named_parameters() if is_dtensor(each)
        ]
        self._local = {id(each.dtensor): each.local for each in self._shards}
        divided = [each for each in self._shards if is_divided(each.dtensor)]
        self.copies = {id(each.local): _copies(each.dtensor, island) for each in divided}
        """By the identity of a divided parameter's part: the positions of an island that have the same part."""
        for each in each_of(optimizer):
            if any(id(parameter) in self._local for parameter in each.state):
                raise UnsupportedState(
                    f"{type(each).__name__} has state of DTensors: make another one, whose state its session loads"
                )
            for group in each.param_groups:
                group["params"] = [self.local(parameter) for parameter in group["params"]]
        self.divided = [each.local for each in divided]
        """The parts of parameters of which others have other parts."""
        self._nbytes = {id(each.local): -(-each.dtensor.nbytes // island.size) for each in divided}
        self._position_of: dict[str, int] = {}
        self._divided_tokens: list[DividedTokens] = []
        self._extents: dict[int, Extent] = {}
        """By the identity of the parts, their places."""

    def local(self, tensor: Tensor) -> Tensor:
        """Return this process's part of a tensor of the model; a plain tensor as it is."""
        found = self._local.get(id(tensor))
        return found if found is not None else local_part(tensor)

    def divide(self, dense: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Return the tensors of the units at this position; parts without elements are in no unit.

        Args:
            dense: tensors of the model by module path and name.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for path, tensors in dense.items():
            for name, tensor in tensors.items():
                extent, local = extent_of(f"{path}.{name}", tensor), self.local(tensor)
                unit = path if extent is None else shard_unit(path, self.island.position, self.island.size)
                if local.numel():
                    found.setdefault(unit, {})[name] = local
                    self._extents |= {} if extent is None else {id(local): extent}
        return found

    def extent(self, tensor: Tensor) -> Extent | None:
        """Return the place of a part, once `divide` has named it; None for any other tensor."""
        return self._extents.get(id(tensor))

    def nbytes(self, parameter: Tensor) -> int:
        """Return the bytes of a parameter's parts at one position, on average: the same number on all members."""
        return self._nbytes.get(id(parameter), parameter.nbytes)

    def spread(self, own: Sequence[Unit], paths: Iterable[str]) -> list[Unit]:
        """Return the units of all positions in the same order on all members; collective in the island.

        Args:
            own: units of this process that are no experts.
            paths: module paths of the model, in its order, and the names of other units.
        """
        size, position = self.island.size, self.island.position
        own_by_name = {unit.name: unit for unit in own}
        said: list[Any] = [None] * size
        mine = {path: own_by_name.get(shard_unit(path, position, size)) for path in paths}
        dist.all_gather_object(said, mine)
        found = []
        for path in mine:
            found += [own_by_name[path]] if path in own_by_name else []
            for each, by_path in enumerate(said):
                if (unit := by_path[path]) is not None:
                    self._position_of[unit.name] = each
                    found.append(unit)
        return found

    def holders(self, unit: str, ranks: int) -> tuple[int, ...]:
        """Return the ranks that train a unit that is no expert: those of its position, or all."""
        position = self._position_of.get(unit)
        return tuple(range(ranks) if position is None else range(position, ranks, self.island.size))

    def divide_tokens(self, layers: Iterable[Experts], group: dist.ProcessGroup) -> None:
        """Let each process of a group send a part of the tokens to experts, which all of them have."""
        self._divided_tokens = [DividedTokens(layer, group) for layer in layers]

    def end(self) -> None:
        """Leave the layers to the script."""
        for each in self._divided_tokens:
            each.end()

    # ---- gradients

    @torch.no_grad()
    def take_gradients(self, others: Iterable[Tensor]) -> None:
        """Move the gradients of the DTensors to the parts that the optimizers step.

        Args:
            others: what is no expert, these parts included.
        """
        for dtensor, local in self._shards:
            gradient, dtensor.grad = dtensor.grad, None
            if gradient is not None and gradient.placements != dtensor.placements:
                gradient = gradient.redistribute(placements=dtensor.placements)
            local.grad = None if gradient is None else gradient.to_local()
            local.requires_grad_(dtensor.requires_grad)
            part = local_part(dtensor)
            if part.data_ptr() != local.data_ptr():  # the wrapper has made new memory for its parameters
                local.data = part
        if self._equal > 1:
            for each in others:
                if each.grad is not None and id(each) not in self.copies:
                    each.grad /= self._equal  # it is summed over all processes, and some have computed the same

    def drop_gradients(self) -> None:
        """Free the gradients of the DTensors, and what FSDP2 has gathered."""
        for dtensor, _ in self._shards:
            dtensor.grad = None
        for module in self._modules:  # gathered by a forward without backward, before an update or a recovery
            module.reshard()


def _check_mesh(name: str, dtensor: Any, island: Island, equal: int) -> None:
    """Refuse a tensor of which processes with different samples have equal parts that nothing sums."""
    mesh, others = dtensor.device_mesh, island.size // equal
    is_tensor_parallel = set(mesh.mesh_dim_names or ()) == {TENSOR_PARALLEL}
    if (is_tensor_parallel and others > 1) or mesh.size() not in (others, island.size):
        raise UnsupportedState(
            f"parameter {name} is divided over {mesh.size()} of the {island.size} processes of an island, and nothing "
            "sums its gradients over the others: apply fully_shard with the other dimensions of the mesh, too"
        )


def _copies(dtensor: Any, island: Island) -> int:
    parts = [
        n for n, each in zip(dtensor.device_mesh.shape, dtensor.placements, strict=True) if not each.is_replicate()
    ]
    return island.size // math.prod(parts)


def is_dtensor(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, without an import of its module."""
    return any(kind.__name__ == "DTensor" for kind in type(tensor).__mro__)


def is_divided(tensor: Any) -> bool:
    """Return whether each process of an island has another part of a tensor."""
    return is_dtensor(tensor) and not all(placement.is_replicate() for placement in tensor.placements)


def local_part(tensor: Any) -> Tensor:
    """Return this process's part of a tensor, in the same memory; a plain tensor as it is."""
    return tensor.detach().to_local() if is_dtensor(tensor) else tensor


def extent_of(name: str, tensor: Any) -> Extent | None:
    """Return the place of this process's part in a tensor; None if it has all of it.

    Raises:
        UnsupportedState: torch places the part elsewhere than its shape says.
    """
    if not is_divided(tensor):
        return None
    (chunk,) = tensor.__create_chunk_list__()  # what torch's distributed checkpoints go by
    found = Extent.from_lists(tensor.shape, chunk.offsets, chunk.sizes)
    if found.shape != (local := tuple(local_part(tensor).shape)):
        raise UnsupportedState(
            f"{name}: this process has a part of shape {local}, but torch expects {found.shape} of {found.full} here"
        )
    return found


def _shard(name: str, dtensor: Any, island: Island, equal: int) -> Shard:
    for placement in dtensor.placements:
        if placement.is_partial():
            raise UnsupportedState(
                f"parameter {name} is a DTensor with the placement {placement}, a sum that is still to be made: "
                "expected Shard or Replicate"
            )
    if is_divided(dtensor):
        _check_mesh(name, dtensor, island, equal)
    return Shard(dtensor, nn.Parameter(local_part(dtensor), dtensor.requires_grad))


def sum_gradients_of(model: nn.Module) -> None:
    """Let FSDP2 sum gradients over the island instead of averaging them: a loss is weighted by a member's samples.

    A module that is gathered, as after a forward without backward, is divided again.
    """
    divide_again(model)
    for module in fsdp_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no sums of multiples


def divide_again(model: nn.Module) -> None:
    """Let each module of FSDP2 have its DTensors as parameters, as forwards without backward leave gathered ones."""
    for module in fsdp_modules(model):
        module.reshard()


def fsdp_modules(model: nn.Module) -> list[Any]:
    """Return the modules to which `fully_shard` was applied."""
    return [m for m in model.modules() if any(kind.__name__ == "FSDPModule" for kind in type(m).__mro__)]
