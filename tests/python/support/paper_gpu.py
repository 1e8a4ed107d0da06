"""A GPU on paper: tensors that say they are on `cuda:0` and have their values on the CPU, and who waits for it.

    with torch.no_grad(), PaperGpu() as gpu:
        layer(gpu.tensor(x))
    gpu.waits        # the ops for which the host would have waited

Only without autograd, which asks CUDA itself for its streams.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::unique_dim")
"""Ops whose results depend on values, so that the host must have them."""


class PaperTensor(Tensor):
    """Says that it is on the GPU."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> PaperTensor:
        found = Tensor._make_wrapper_subclass(
            cls, value.size(), strides=value.stride(), dtype=value.dtype, device=DEVICE, requires_grad=False
        )
        found.value = value
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of PaperGpu")

    def __repr__(self) -> str:
        return f"PaperTensor({self.value})"


class PaperGpu(TorchDispatchMode):
    """The GPU while it is there; notes what makes the host wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self._pinned: set[int] = set()
        """Storages of page-locked memory."""

    def __enter__(self) -> PaperGpu:
        self._start = torch.cuda._lazy_init
        torch.cuda._lazy_init = lambda: None  # there is no driver to start
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        torch.cuda._lazy_init = self._start

    @staticmethod
    def tensor(value: Tensor) -> Tensor:
        """The tensor on the GPU."""
        return PaperTensor(value.contiguous())

    def move(self, model: nn.Module) -> nn.Module:
        """Moves a model there, in place."""
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(self.tensor(parameter.detach()), requires_grad=False))
        return model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat = tree_flatten((args, kwargs))[0]
        was_there = any(isinstance(each, PaperTensor) for each in flat)
        is_pinned = kwargs.pop("pin_memory", None)
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        goes_there = device.type == "cuda" if device is not None else was_there
        self._note(func, args, kwargs, was_there, goes_there)
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        found = func(*tree_map(_value, args), **tree_map(_value, kwargs))
        if is_pinned:
            self._pinned.add(found.untyped_storage().data_ptr())
        if func._schema.is_mutable and not isinstance(found, tuple):
            return next((each for each in flat if _value(each) is found), found)
        return tree_map(lambda each: PaperTensor(each) if isinstance(each, Tensor) and goes_there else each, found)

    def _note(self, func: Any, args: Any, kwargs: Any, was_there: bool, goes_there: bool) -> None:
        name = func._schema.name
        if name == "aten::_to_copy" and was_there != goes_there:
            source = args[0]
            at_leisure = not was_there and kwargs.get("non_blocking") and self._is_pinned(source)
            if not at_leisure:
                self.waits.append(f"{name} {'from' if was_there else 'to'} the GPU")
        crosses = name == "aten::copy_" and isinstance(args[0], PaperTensor) != isinstance(args[1], PaperTensor)
        if crosses or (was_there and name in READS):
            self.waits.append(name)

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned


def _value(each: Any) -> Any:
    return each.value if isinstance(each, PaperTensor) else each
