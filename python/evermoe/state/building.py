"""Builds models without memory, and records what their constructors do to tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from evermoe.state.rebuild import Rebuild
from evermoe.state.recording import Operation, Recording, View, memory_of, views_in

LARGE = 1 << 14
"""Elements from which on a tensor has no memory while a model is built."""
_PLACES = ("device", "pin_memory", "generator")
"""Arguments of which a repetition takes no notice."""
_NOWHERE = torch.device("meta")


class Building(TorchDispatchMode):
    """Makes large tensors on the `meta` device while it is entered, with a shape and no memory, and records everything.

    Small ones are made as always, so that a constructor can read them; where it reads others, those are made for that.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording
        self._draws = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, Tensor)]
        changed = [memory_of(each) for each in _changed(func, args, kwargs)]
        for tensor in tensors:
            if not tensor.is_meta:
                self._recording.note_constant(tensor)
        if any(each.is_meta for each in tensors):
            result = self._run_without_memory(func, args, kwargs)
        else:
            result = _make_large(func, args, kwargs) if _is_maker(func) else None
            result = func(*args, **kwargs) if result is None else result
        self._record(func, args, kwargs, result, changed)
        return result

    def _run_without_memory(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operation some of whose tensors have no memory; what must know values gets them."""
        gives_tensors = any("Tensor" in str(each.type) for each in func._schema.returns)
        if gives_tensors and all(each.is_meta for each in _changed(func, args, kwargs)):
            try:
                return func(*tree_map(_bare, args), **_elsewhere(tree_map(_bare, kwargs)))
            except (NotImplementedError, RuntimeError):  # its shape depends on values
                pass
        known = self._with_values((args, kwargs))
        return func(*known[0], **known[1])

    def _with_values(self, tree: Any) -> Any:
        rebuild = Rebuild(self._recording)
        return tree_map(lambda each: rebuild.value(each) if isinstance(each, Tensor) and each.is_meta else each, tree)

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any, changed: list[int]) -> None:
        made = [each if isinstance(each, Tensor) else None for each in tree_flatten(result)[0]]
        new = tuple(View.of(each) if each is not None and not self._recording.knows(each) else None for each in made)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self._draws += draws
        if not changed and not any(new):
            return
        for each in made:
            if each is not None:
                self._recording.keep(each)
        kept = {key: value for key, value in kwargs.items() if key not in _PLACES}
        args, kept = tree_map(lambda each: View.of(each) if isinstance(each, Tensor) else each, (tuple(args), kept))
        reads = frozenset(each.memory for each in views_in((args, kept)))
        writes = frozenset([*changed, *(each.memory for each in new if each is not None)])
        draw = self._draws if draws else -1
        self._recording.add(Operation(func, args, kept, new, reads, writes, draw))


def _bare(each: Any) -> Any:
    """A tensor of the same layout without memory."""
    if isinstance(each, Tensor) and not each.is_meta:
        return torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
    return each


def _changed(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The arguments that an operation writes."""
    found = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            found += [each for each in tree_flatten(value)[0] if isinstance(each, Tensor)]
    return found


def _elsewhere(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same arguments for a tensor without memory."""
    kept = {key: value for key, value in kwargs.items() if key not in _PLACES}
    return kept | ({"device": _NOWHERE} if kwargs.get("device") is not None else {})


def _is_maker(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


def _make_large(func: Any, args: Any, kwargs: Any) -> Any:
    """Return what a maker of tensors makes, without memory; None if it is small, or not made so."""
    try:
        made = func(*args, **_elsewhere(kwargs) | {"device": _NOWHERE})
    except (NotImplementedError, RuntimeError, TypeError):
        return None
    return made if isinstance(made, Tensor) and made.numel() >= LARGE else None
