"""Gathers the weights of a model whose experts are distributed over ranks: on rank 0, one module or layer at a time.

All ranks walk the model in the same order. An expert's first holder sends it to rank 0; all other parameters are on all
ranks. Only rank 0 uses what it iterates over. Tensors that an island divides are gathered in each island.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from evermoe.checkpoint.weight_folder import WeightFolder
from evermoe.comm.gather import share_json
from evermoe.comm.group import Group
from evermoe.errors import PersistFailed, UnsupportedState
from evermoe.moe.experts import Experts, expert_layers
from evermoe.state.shards import divide_again, is_dtensor, local_part
from evermoe.state.unit import own_tensors

T = TypeVar("T")
Piece = dict[str, Any]
"""A part of a state dict."""


class LiveWeights:
    """Provides one rank with the weights of a model that ranks train, as a `WeightSource`; collective.

    All ranks request the same units in the same order; only the root receives them.
    """

    def __init__(self, root: int = 0) -> None:
        self._root = root

    def describe(self) -> str:
        """Return a description of the weights."""
        return "the model that is trained"

    @torch.no_grad()
    def fill(self, path: str, module: nn.Module, tensors: Mapping[str, Tensor], expert: int | None) -> None:
        """Write the values of one unit; see `WeightSource`. An expert's tensors are on the CPU.

        Raises:
            PeerLost: a member is lost.
        """
        if expert is not None and isinstance(module, Experts):
            _fill_expert(module, expert, tensors["weights"], self._root)
            return
        own = dict(own_tensors(module))
        for name, tensor in tensors.items():
            tensor.copy_(own[name])


def _fill_expert(layer: Experts, expert: int, row: Tensor, root: int = 0) -> None:
    group, holder = layer.group, int(np.flatnonzero(layer.matrix_RE[:, expert])[0])
    mine = layer.weights[layer.ids.index(expert)].detach() if group.rank == holder else row
    if holder == group.rank == root:
        row.copy_(mine)
    elif group.rank == holder:
        group.exchange([(mine.cpu().view(torch.uint8), root)], [])
    elif group.rank == root:
        group.exchange([], [(row.view(torch.uint8), holder)])


@torch.no_grad()
def pieces(module: nn.Module, prefix: str = "") -> Iterator[Piece]:
    """Yield the state dict of a model with all its experts, in parts and in its order; collective.

    Parameters that are not experts share the model's memory, those that an island divides are on the CPU. Ranks other
    than 0 get only the keys of experts.

    Raises:
        UnsupportedState: a module around expert layers changes its state dict by hooks.
        PeerLost: a member is lost.
    """
    if isinstance(module, Experts):
        yield _whole(module).state_dict(prefix=prefix)
    elif not expert_layers(module):
        divide_again(module)
        yield _joined(module.state_dict(prefix=prefix))
    elif "_checkpoint_wrapped_module" in module._modules:  # its hook removes this name from the keys
        yield from pieces(module._modules["_checkpoint_wrapped_module"], prefix)  # type: ignore[arg-type]
    else:
        if module._state_dict_hooks or type(module).state_dict is not nn.Module.state_dict:
            raise UnsupportedState(
                f"{prefix.removesuffix('.') or 'the model'} ({type(module).__name__}) has MoE layers and changes its "
                "state dict by a hook or a method of its own, which would need all of it in memory: use a checkpoint "
                "of the session (checkpoints=), which evermoe.load_weights reads"
            )
        own: Piece = {}
        divide_again(module)
        module._save_to_state_dict(own, prefix, keep_vars=False)
        yield _joined(own)
        for name, child in module._modules.items():
            if child is not None:
                yield from pieces(child, f"{prefix}{name}.")


def _joined(piece: Piece) -> Piece:
    return {key: each.full_tensor().cpu() if is_dtensor(each) else each for key, each in piece.items()}


def _whole(layer: Experts) -> Experts:
    """Return a stand-in with all experts on rank 0 and none on the others; use it only for its state dict."""
    is_first = layer.group.rank == 0
    weights = torch.empty(layer.num_experts * is_first, layer.expert.row_size, dtype=layer.weights.dtype)
    for expert in range(layer.num_experts):
        _fill_expert(layer, expert, weights[expert] if is_first else weights)
    gathered: Experts = object.__new__(type(layer))
    parameters = layer._parameters | {"weights": nn.Parameter(weights, requires_grad=False)}
    gathered.__dict__ = layer.__dict__ | {"_parameters": parameters, "ids": list(range(layer.num_experts))}
    return gathered


def gather(model: nn.Module, group: Group) -> Piece:
    """Return the state dict of a model with all its experts on the CPU of rank 0; empty on the others. Collective.

    Raises:
        UnsupportedState, PeerLost: as for `pieces`.
    """
    tensors = map(local_part, (*model.parameters(), *model.buffers()))
    own = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    copies: dict[Any, Tensor] = {}

    def apart(value: Any) -> Any:
        """Return a copy that the model's next steps do not change; tied tensors stay tied."""
        if not isinstance(value, Tensor) or value.untyped_storage().data_ptr() not in own:
            return value
        key = value.data_ptr(), value.dtype, value.shape, value.stride()
        if key not in copies:
            copies[key] = value.detach().to("cpu", copy=True)
        return copies[key]

    state: Piece = {}
    for piece in pieces(model):
        if group.rank == 0:
            state |= {key: apart(value) for key, value in piece.items()}
    group.all_reduce(torch.ones(1))  # all members know that the state is complete, or none treats it as complete
    return state


def write(
    parts: Iterable[Mapping[str, Any]],
    folder: Path,
    group: Group,
    add_more: Callable[[Path], None] = lambda draft: None,
    root: int = 0,
) -> None:
    """Write parts of a state dict to a folder, one after the other, from one rank; collective.

    Args:
        parts: the root writes its own; the others only iterate over theirs.
        folder: must be empty or missing; it appears once all files are on disk.
        group: of the ranks.
        add_more: as for `WeightFolder.publish`.
        root: the rank that writes.

    Raises:
        PersistFailed: the root could not write. All ranks raise it, and the folder does not exist.
        UnsupportedState: a part contains something other than tensors.
        PeerLost: a member is lost. The folder is complete or does not exist.
    """
    draft: WeightFolder | None = None
    problem = ""
    try:
        if group.rank == root:
            draft, problem = _attempt(lambda: WeightFolder(folder))
        _agree(group, problem, root)
        for part in parts:
            _check_tensors(part)
            if draft is not None and not problem:  # after a problem, the loop continues to receive what the others send
                _, problem = _attempt(lambda part=part: draft.add_tensors(part))  # type: ignore[misc]
        if draft is not None and not problem:
            _, problem = _attempt(lambda: draft.publish(add_more))
        _agree(group, problem, root)
    finally:
        if draft is not None:
            draft.__exit__(None, None, None)


def follow_export(model: nn.Module, group: Group, root: int) -> None:
    """Send this rank's experts to a root that exports the model by `LiveWeights` and `write`; collective.

    Raises:
        PersistFailed: the root could not write.
        PeerLost: a member is lost.
    """
    _agree(group, "", root)
    for layer in expert_layers(model).values():
        for expert in range(layer.num_experts):
            _fill_expert(layer, expert, layer.weights, root)
    _agree(group, "", root)


def _attempt(action: Callable[[], T]) -> tuple[T | None, str]:
    """Return the result of an action, or the reason why it failed."""
    try:
        return action(), ""
    except (OSError, SafetensorError) as error:
        return None, str(error) or type(error).__name__


def _agree(group: Group, problem: str, root: int) -> None:
    problem = share_json(group, problem, root)
    if problem:
        raise PersistFailed(f"the weights were not written: rank {root}: {problem}")


def _check_tensors(part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if not isinstance(value, Tensor):
            raise UnsupportedState(
                f"{key} of the state dict is a {type(value).__name__}, and the files hold only tensors: leave `folder` "
                "out, and save the state dict that rank 0 gets"
            )
