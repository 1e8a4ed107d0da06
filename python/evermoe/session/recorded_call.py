"""A call of a module or of an expert in a step, recorded by one member and repeated by another."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from evermoe.moe import graph_ops
from evermoe.moe.expert import norm_rows
from evermoe.moe.experts import Experts
from evermoe.moe.recorded_rows import RECORDERS

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference, as a part of the largest element, between two results that are right but not equal to the bit."""
MAX_BYTES = 32 << 20
"""Of a call's input, output and their gradients that are recorded."""
ROW_WISE = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, Experts)
"""Modules that treat each row by itself."""
INPUT, OUTPUT = "input", "output"
OF_INPUT, OF_OUTPUT, OF_WEIGHT = "gradient of input", "gradient of output", "gradient of "


class Subject(NamedTuple):
    """Subject of a call: one of torch's modules with weights, or an expert of a layer."""

    unit: str
    path: str
    """Of the module, or of the expert's layer."""
    expert: int | None
    holders: tuple[int, ...]
    """Ranks that can compute it."""


class RecordedCall:
    """Records the first call of a subject in a step: its input and output, and their gradients and those of weights.

    If they are larger than `MAX_BYTES`, some rows are recorded, without the weights' gradients, which are of all rows.
    Nothing is recorded inside of `torch.compile` or a CUDA graph, where the module has other arguments than one tensor,
    or in a forward without gradients.

    Args:
        module: the subject's, or the layer of the expert.
        expert: its index among the layer's local experts; None for a module.
        number: chooses the rows.
    """

    def __init__(self, module: nn.Module, expert: int | None, number: int = 0) -> None:
        self._module, self._expert, self._number = module, expert, number
        self._found: dict[str, Tensor] = {}
        self._manner: tuple[bool, torch.dtype] = False, torch.float32
        self._calls = 0
        self._rows: slice | None = None
        """Those that are recorded; None for the tensors as they are."""
        self._given: Tensor | None = None
        """Input of the call under way, if it is recorded."""
        self._hooks: list[Any] = []
        if isinstance(module, Experts):
            RECORDERS[module] = self._record_rows
        else:
            self._hooks = [
                module.register_forward_pre_hook(self._before, with_kwargs=True),
                module.register_forward_hook(self._after),
            ]

    def end(self) -> dict[str, Any]:
        """Remove the hooks; return the record, empty if nothing was recorded."""
        for hook in self._hooks:
            hook.remove()
        if isinstance(self._module, Experts):
            RECORDERS.pop(self._module, None)
        found, self._found = self._found, {}
        if OUTPUT not in found or OF_OUTPUT not in found:
            return {}
        if self._calls > 1:  # weights have the sum of all calls
            found = {name: tensor for name, tensor in found.items() if not is_of_weight(name)}
        return {"tensors": found, "autocast": self._manner}

    def _begins(self, tensor: Tensor) -> bool:
        """Count a call; return whether it is recorded."""
        if not torch.is_grad_enabled() or (tensor.is_cuda and torch.cuda.is_current_stream_capturing()):
            return False
        self._calls += 1
        kind = tensor.device.type
        self._manner = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        return self._calls == 1

    def _select(self, given: Tensor, output: Tensor) -> bool:
        """Choose the rows to record; return whether there are any, and few enough."""
        nbytes = 2 * (given.nbytes + output.nbytes)
        if nbytes > MAX_BYTES:
            if not isinstance(self._module, ROW_WISE):
                return False
            rows = output.numel() // output.shape[-1]
            count = min(rows, max(1, rows * MAX_BYTES // nbytes))
            start = self._number % (rows - count + 1)
            self._rows = slice(start, start + count)
        return output.numel() > 0

    def _cut(self, tensor: Tensor, *, is_output: bool = True) -> Tensor:
        if self._rows is None:
            return tensor
        by_row = is_output or not isinstance(self._module, nn.Embedding)
        return (tensor.reshape(-1, tensor.shape[-1]) if by_row else tensor.reshape(-1))[self._rows]

    def _record(self, given: Tensor, output: Tensor, part: slice | None = None) -> None:
        """Record a call's tensors, and their gradients when they come.

        Args:
            given: that only this call uses.
            output: of the call.
            part: rows of both that belong to the subject; None for all.
        """

        def of(tensor: Tensor) -> Tensor:
            return tensor if part is None else tensor[part]

        if not output.requires_grad or not self._select(of(given), of(output)):
            return
        self._found[INPUT] = self._cut(of(given.detach()), is_output=False).clone()
        self._found[OUTPUT] = self._cut(of(output.detach())).clone()
        output.register_hook(self._keeper(OF_OUTPUT, of))
        if given.requires_grad:
            given.register_hook(self._keeper(OF_INPUT, of))
        if self._rows is None:
            for name, parameter in self._module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    self._hooks.append(parameter.register_hook(self._keeper(f"{OF_WEIGHT}{name}", self._own_row)))

    def _own_row(self, gradient: Tensor) -> Tensor:
        return gradient if self._expert is None else gradient[self._expert]

    def _keeper(self, name: str, of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            if name not in self._found:
                self._found[name] = self._cut(of(gradient.detach())).clone()

        return keep

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._given = None
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or not self._begins(args[0]):
            return None
        self._given = args[0].view_as(args[0])  # others use the tensor, too, and have parts in its gradient
        return (self._given,), {}

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._given is not None and isinstance(output, Tensor):
            self._record(self._given, output)
        self._given = None

    def _record_rows(self, rows_NH: Tensor, ends_e: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        given = rows_NH.view_as(rows_NH)
        output = compute(given)
        if self._begins(given):
            assert self._expert is not None
            start, end = [0, *ends_e.tolist()][self._expert : self._expert + 2]
            self._record(given, output, slice(start, end))
        return output


def is_of_weight(name: str) -> bool:
    """Return whether a recorded tensor is the gradient of a weight."""
    return name.startswith(OF_WEIGHT) and name not in (OF_INPUT, OF_OUTPUT)


def to_bytes(record: Mapping[str, Any]) -> bytes:
    """Return a record as bytes, from any device."""
    buffer = io.BytesIO()
    torch.save({**record, "tensors": {name: each.cpu() for name, each in record["tensors"].items()}}, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes, device: torch.device) -> dict[str, Any]:
    """Return the inverse of `to_bytes`, with tensors on a device."""
    return dict(torch.load(io.BytesIO(data), map_location=device, weights_only=True))


def repeat(module: nn.Module, expert: int | None, record: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what a recorded call gives here: its output and all gradients of the record.

    Args:
        module: as of `RecordedCall`, with the same weights.
        expert: of this member's local experts.
        record: of another member.
    """
    tensors, (is_autocast, dtype) = record["tensors"], record["autocast"]
    given = tensors[INPUT].requires_grad_(OF_INPUT in tensors)
    with torch.enable_grad(), torch.autocast(given.device.type, dtype, enabled=is_autocast):
        if isinstance(module, Experts):
            weights = {"weights": module.weights[expert].detach().requires_grad_()}
            ends_e = torch.tensor([len(given)], dtype=torch.int32, device=given.device)
            views = module.expert.views(weights["weights"][None].to(given.dtype))
            output = module.expert.apply(given, views, graph_ops.product_of(ends_e), ends_e)
            if module.post_norm is not None:
                output = norm_rows(module.post_norm, output, ends_e)
        else:
            weights = {name: each.detach().requires_grad_() for name, each in module.named_parameters(recurse=False)}
            alone = copy.copy(module)
            alone.__dict__["_parameters"] = dict.fromkeys(module._parameters) | weights  # a bias may be None
            alone.__dict__["_buffers"] = {name: each.clone() for name, each in module.named_buffers(recurse=False)}
            output = alone.forward(given)
        wanted = {OF_INPUT: given} | {f"{OF_WEIGHT}{name}": each for name, each in weights.items()}
        wanted = {name: each for name, each in wanted.items() if name in tensors}
        found = torch.autograd.grad(output, [*wanted.values()], tensors[OF_OUTPUT], allow_unused=True) if wanted else ()
    gradients = {name: each for name, each in zip(wanted, found, strict=True) if each is not None}
    return {OUTPUT: output.detach(), **gradients}


def differing(record: Mapping[str, Any], repeated: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the recorded results that are not those of the repeated call.

    Equal bits are right. Others may be, where libraries choose other kernels: they differ by `TOLERANCES` at most.
    """
    is_autocast, dtype = record["autocast"]
    found = []
    for name, value in repeated.items():
        tolerance = max(TOLERANCES.get(each, 0.0) for each in (value.dtype, dtype if is_autocast else value.dtype))
        if not _is_close(record["tensors"][name], value, tolerance):
            found.append(name)
    return found


def _is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    if torch.equal(one, other):
        return True
    one, other = one.double(), other.double()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return False
    distance = (one - other).nan_to_num(0.0, 0.0, 0.0).abs().max()
    largest = torch.maximum(one.abs(), other.abs()).nan_to_num(0.0, 0.0, 0.0).max()
    return bool(distance <= tolerance * largest)
