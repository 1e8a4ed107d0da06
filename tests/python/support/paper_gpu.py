"""A GPU on paper: tensors that say they are on `cuda:0` and have their values on the CPU, and what waits for it.

    with PaperGpu() as gpu:
        layer(gpu.tensor(x)).sum().backward()
    gpu.waits        # the ops for which the host would have waited
    gpu.done         # all that the host has launched and waited for, in this order

To autograd they are on the device `meta`, which has no streams.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from evermoe.comm.mesh import Mesh

DEVICE = torch.device("cuda", 0)
OPS = {
    "aten": """
        _foreach_norm _softmax _softmax_backward_data _to_copy abs add add_ addmm all arange cat clamp clamp_ clone
        cumsum detach div empty_like eq expand full gather ge index_select isfinite lt masked_fill mean mm mul ne neg
        new_empty new_zeros ones ones_like pow randn_like remainder rsqrt rsub scalar_tensor scatter scatter_
        scatter_add searchsorted select sigmoid sigmoid_backward silu silu_backward slice slice_backward
        split_with_sizes squeeze stack sub sum t take topk transpose unbind uniform_ unsqueeze view where zero_
        zeros zeros_like
    """,
    "evermoe": """dequantize_rows dispatch_plan expert_histogram invert_positions permute quantize_rows regroup
        split_tokens unpermute unpermute_backward""",
}
SAFE = {f"{space}::{name}" for space, names in OPS.items() for name in names.split()}
"""Ops for which no host waits, whatever is in their tensors. Copies, and ops with some cases that wait, are looked at
one by one; any other op counts as a wait."""
NO_WORK = {"aten::detach", "aten::empty_like", "aten::new_empty", "aten::t"}
"""Ops other than views that launch nothing."""


class PaperTensor(Tensor):
    """Says that it is on the GPU."""

    value: Tensor

    @staticmethod
    def __new__(cls, value: Tensor) -> PaperTensor:
        found = Tensor._make_wrapper_subclass(
            cls, value.size(), strides=value.stride(), dtype=value.dtype, device="meta", requires_grad=False
        )
        found.value = value
        return found

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of PaperGpu")

    def tolist(self) -> Any:
        """The values, read by the host."""
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PaperTensor({self.value})"


class PaperStream:
    """The GPU's stream; its copies into page-locked memory are complete once an event after them was waited for."""

    def __init__(self, gpu: PaperGpu) -> None:
        self.copies: list[Callable[[], Any]] = []
        self._gpu = gpu

    def synchronize(self) -> None:
        """Waits for all copies so far."""
        self._gpu.note_wait("synchronize")
        for copy in self.copies:
            copy()
        self.copies.clear()

    def record_event(self) -> PaperStream:
        """An event after the copies so far."""
        event = PaperStream(self._gpu)
        event.copies = list(self.copies)
        return event


class PaperGpu(TorchDispatchMode):
    """The GPU while it exists; notes what makes the host wait, and each op that is not in `SAFE`."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.done: list[str] = []
        """Names of the ops that launch work, views left out, and "wait" for each wait."""
        self._stream = PaperStream(self)
        self._pinned: set[int] = set()
        """Storages of page-locked memory."""
        self._patches = ExitStack()

    def __enter__(self) -> PaperGpu:
        for name, stand_in in {
            "_lazy_init": lambda: None,  # there is no driver to start
            "current_stream": lambda device=None: self._stream,
            "synchronize": lambda device=None: self._stream.synchronize(),
        }.items():
            self._patches.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        for name in ("all_gather", "all_to_all"):
            self._patches.enter_context(mock.patch.object(Mesh, name, self._over_nccl(name, getattr(Mesh, name))))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patches.close()

    def _over_nccl(self, name: str, collective: Callable[..., str | None]) -> Callable[..., str | None]:
        """Return a collective that the host launches and does not wait for."""

        def launch(mesh: Mesh, *values: Any) -> str | None:
            if any(map(_is_there, values)):
                self.done.append(name)
            return collective(mesh, *map(_value, values))

        return launch

    @staticmethod
    def tensor(value: Tensor) -> Tensor:
        """The tensor on the GPU."""
        return PaperTensor(value.detach().contiguous())

    def move(self, model: nn.Module) -> nn.Module:
        """Move a model to that device, in place."""
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(self.tensor(parameter)))
        return model

    def note_wait(self, name: str) -> None:
        """Note what the host waits for."""
        self.waits.append(name)
        self.done.append("wait")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat = tree_flatten((args, kwargs))[0]
        was_there = any(isinstance(each, PaperTensor) for each in flat)
        is_pinned = kwargs.pop("pin_memory", None)
        device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        goes_there = device.type != "cpu" if device is not None else was_there
        name = func._schema.name
        if (was_there or goes_there) and not func.is_view and name not in NO_WORK:
            self.done.append(name)
        if name == "aten::copy_":
            return self._copy(*args, **kwargs)
        self._note(name, args, kwargs, was_there, goes_there)
        if device is not None:
            kwargs["device"] = torch.device("cpu")
        found = func(*tree_map(_value, args), **tree_map(_value, kwargs))
        if is_pinned:
            self._pinned.add(found.untyped_storage().data_ptr())
        if func._schema.is_mutable and not isinstance(found, tuple):
            return next((each for each in flat if _value(each) is found), found)
        return tree_map(lambda each: PaperTensor(each) if isinstance(each, Tensor) and goes_there else each, found)

    def _note(self, name: str, args: Any, kwargs: Any, was_there: bool, goes_there: bool) -> None:
        if name == "aten::_to_copy" and was_there != goes_there:
            at_leisure = not was_there and kwargs.get("non_blocking") and self._is_pinned(args[0])
            if not at_leisure:
                self.note_wait(f"{name} {'from' if was_there else 'to'} the GPU")
        elif (was_there or goes_there) and name not in SAFE and not _is_quick(name, args):
            self.note_wait(name)

    def _copy(self, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        copy = lambda: _value(to).copy_(_value(source))  # noqa: E731
        crosses = _is_there(to) != _is_there(source)
        if crosses and not (non_blocking and self._is_pinned(source if _is_there(to) else to)):
            self.note_wait("aten::copy_")
        elif crosses and _is_there(source):
            to.fill_(-1)  # until it is waited for
            self._stream.copies.append(copy)
            return to
        copy()
        return to

    def _is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._pinned


def _is_quick(name: str, args: Any) -> bool:
    """Whether this call of an op, of which others wait, does not."""
    if name == "aten::index":  # masks are counted, and indices on the CPU are copied
        return all(each is None or (_is_there(each) and each.dtype == torch.int64) for each in args[1])
    return name == "aten::_grouped_mm" and args[0].dtype == torch.bfloat16


def _is_there(each: Any) -> bool:
    return isinstance(each, PaperTensor)


def _value(each: Any) -> Any:
    return each.value if isinstance(each, PaperTensor) else each
