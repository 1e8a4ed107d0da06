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
CANCELLED = 1e-3
"""A result whose largest element is this part of its source's has lost digits in a sum."""
INPUT, OUTPUT = "input", "output"
OF_INPUT, OF_OUTPUT = "gradient of input", "gradient of output"


class Subject(NamedTuple):
    """Subject of a call: one of torch's modules with weights, or an expert of a layer."""

    unit: str
    path: str
    """Of the module, or of the expert's layer."""
    expert: int | None
    holders: tuple[int, ...]
    """Ranks that can compute it."""


class RecordedCall:
    """Records the first call of a subject in a step: its input and output, and their gradients.

    If they are larger than `MAX_BYTES`, some rows are recorded. Gradients of weights are left out: they are sums over
    all uses of a weight. Nothing is recorded inside of `torch.compile`, a CUDA graph or a transform of functions, in a
    forward without gradients, where the module has other arguments than one plain tensor or hooks that may change its
    result, or if more than one backward goes through the call.

    Args:
        module: the subject's, or the layer of the expert.
        expert: its index among the layer's local experts; None for a module.
        number: chooses the rows.
    """

    def __init__(self, module: nn.Module, expert: int | None, number: int = 0) -> None:
        self._module, self._expert, self._number = module, expert, number
        self._found: dict[str, Tensor] = {}
        self._manner: dict[str, Any] = {}
        """Circumstances of the recorded call."""
        self._has_begun = self._is_unfit = False
        self._rows: slice | None = None
        """Those that are recorded; None for the tensors as they are."""
        self._given: Tensor | None = None
        """Input of the call under way, if it is recorded."""
        self._hooks: list[Any] = []
        if isinstance(module, Experts):
            RECORDERS[module] = self._record_rows
        else:
            self._hooks = [
                module.register_forward_pre_hook(self.before, with_kwargs=True),
                module.register_forward_hook(self.after),
            ]

    def __reduce__(self) -> tuple[Callable[[], RecordedCall], tuple[()]]:
        """A copy of the model, or a file of it, records nothing."""
        return _inert, ()

    def end(self) -> dict[str, Any]:
        """Remove the hooks; return the record, empty if nothing was recorded."""
        for hook in self._hooks:
            hook.remove()
        if isinstance(self._module, Experts):
            RECORDERS.pop(self._module, None)
        found, self._found = self._found, {}
        if self._is_unfit or OUTPUT not in found or OF_OUTPUT not in found:
            return {}
        return {"tensors": found, **self._manner}

    def _begins(self, tensor: Tensor) -> bool:
        """Return whether a call is the first one that can be recorded."""
        if self._has_begun or not torch.is_grad_enabled() or not is_plain(tensor):
            return False
        kind = tensor.device.type
        autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        self._manner = {"autocast": autocast, "training": self._module.training}
        self._has_begun = True
        return True

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

        if not output.requires_grad or not is_plain(output) or not self._select(of(given), of(output)):
            return
        self._found[INPUT] = self._cut(of(given.detach()), is_output=False).clone()
        self._found[OUTPUT] = self._cut(of(output.detach())).clone()
        output.register_hook(self._keeper(OF_OUTPUT, of))
        if given.requires_grad:
            given.register_hook(self._keeper(OF_INPUT, of))

    def _keeper(self, name: str, of: Callable[[Tensor], Tensor]) -> Callable[[Tensor], None]:
        def keep(gradient: Tensor) -> None:
            if name in self._found or torch.is_grad_enabled() or not is_plain(gradient):
                self._is_unfit = True  # the parts would be of several backwards
            elif OUTPUT in self._found:
                self._found[name] = self._cut(of(gradient.detach())).clone()

        return keep

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Give the module an input of its own: others use the tensor, too, and have parts in its gradient."""
        if torch.compiler.is_compiling():
            return None
        self._given = None
        if len(args) != 1 or kwargs or has_own_code(module) or not self._begins(args[0]):
            return None
        self._given = args[0].view_as(args[0])
        return (self._given,), {}

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Record the call."""
        if torch.compiler.is_compiling():
            return
        given, self._given = self._given, None
        if given is not None:
            self._record(given, output)

    def _record_rows(self, rows_NH: Tensor, ends_e: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        if not self._begins(rows_NH):
            return compute(rows_NH)
        assert self._expert is not None
        given = rows_NH.view_as(rows_NH)
        output = compute(given)
        start, end = [0, *ends_e.tolist()][self._expert : self._expert + 2]
        self._record(given, output, slice(start, end))
        return output


def _inert() -> RecordedCall:
    """Return a recorder that stands in a copy of its module, and records nothing."""
    call = RecordedCall.__new__(RecordedCall)
    call._has_begun, call._given = True, None
    return call


def is_plain(value: object) -> bool:
    """Return whether a value is a tensor that can be recorded: strided, of no subclass, and now."""
    if type(value) not in (Tensor, nn.Parameter):
        return False
    assert isinstance(value, Tensor)
    if value.is_nested or value.layout != torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return False
    return not (value.is_cuda and torch.cuda.is_current_stream_capturing())


def has_own_code(module: nn.Module) -> bool:
    """Return whether a script may have changed what a module computes: by hooks, or by a forward of its own."""
    hooks = len(module._forward_hooks) - 1 + len(module._backward_hooks) + len(module._backward_pre_hooks)
    return hooks > 0 or "forward" in module.__dict__


def to_bytes(record: Mapping[str, Any]) -> bytes:
    """Return a record as bytes, from any device."""
    buffer = io.BytesIO()
    torch.save({**record, "tensors": {name: each.cpu() for name, each in record["tensors"].items()}}, buffer)
    return buffer.getvalue()


def from_bytes(data: bytes, device: torch.device) -> dict[str, Any]:
    """Return the inverse of `to_bytes`, with tensors on a device."""
    return dict(torch.load(io.BytesIO(data), map_location=device, weights_only=True))


def repeat(module: nn.Module, expert: int | None, record: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what a recorded call gives here: its output, and the gradient of its input if that was recorded.

    Args:
        module: as of `RecordedCall`, with the same weights.
        expert: of this member's local experts.
        record: of another member.
    """
    tensors, (is_autocast, dtype) = record["tensors"], record["autocast"]
    given = tensors[INPUT].requires_grad_(OF_INPUT in tensors)
    with torch.enable_grad(), torch.autocast(given.device.type, dtype, enabled=is_autocast):
        if isinstance(module, Experts):
            ends_e = torch.tensor([len(given)], dtype=torch.int32, device=given.device)
            views = module.expert.views(module.weights[expert].detach()[None].to(given.dtype))
            output = module.expert.apply(given, views, graph_ops.product_of(ends_e), ends_e)
            if module.post_norm is not None:
                output = norm_rows(module.post_norm, output, ends_e)
        else:
            alone = copy.copy(module)  # with buffers of its own, and weights without gradients
            weights = {name: each.detach() for name, each in module.named_parameters(recurse=False)}
            buffers = {name: each.clone() for name, each in module.named_buffers(recurse=False)}
            alone.__dict__["_parameters"] = dict.fromkeys(module._parameters) | weights
            alone.__dict__["_buffers"] = dict.fromkeys(module._buffers) | buffers
            alone.training = record["training"]
            output = alone.forward(given)
        found = {OUTPUT: output.detach()}
        if OF_INPUT in tensors:
            (found[OF_INPUT],) = torch.autograd.grad(output, given, tensors[OF_OUTPUT])
    return found


def differing(record: Mapping[str, Any], repeated: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the recorded results that are not those of the repeated call.

    Equal bits are right. Others may be, where libraries choose other kernels: they differ by `TOLERANCES` at most, or
    are small compared with what they are made of, as sums that cancel.
    """
    is_autocast, dtype = record["autocast"]
    tensors, found = record["tensors"], []
    for name, value in repeated.items():
        tolerance = max(TOLERANCES.get(each, 0.0) for each in (value.dtype, dtype if is_autocast else value.dtype))
        source = tensors[INPUT if name == OUTPUT else OF_OUTPUT]
        if not _is_close(tensors[name], value, tolerance, source):
            found.append(name)
    return found


def _is_close(one: Tensor, other: Tensor, tolerance: float, source: Tensor) -> bool:
    if torch.equal(one, other):
        return True
    one, other = one.double(), other.double()
    if not torch.equal(one.isfinite(), other.isfinite()):
        return False
    distance = (one - other).nan_to_num(0.0, 0.0, 0.0).abs().max()
    largest = torch.maximum(_largest(one), _largest(other))
    if source.is_floating_point():
        largest = torch.maximum(largest, CANCELLED * _largest(source.double()))
    return bool(distance <= tolerance * largest)


def _largest(tensor: Tensor) -> Tensor:
    return tensor.nan_to_num(0.0, 0.0, 0.0).abs().max()
