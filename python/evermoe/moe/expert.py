"""Definition of an expert of an MoE layer: its matrices and biases, their layout in memory, and its function.

Shape suffixes: H hidden width, I inner width, e experts of this rank, N rows, C columns, D outputs, W an expert's row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROW_ALIGNMENT = 32
"""An expert's flat weights are padded to a multiple of this number of elements: full SIMD registers for every type.

Kernels round the remainder at the end of a tensor differently. Without padding, replicas of an expert would differ by
their position in the stack.
"""

Activation = Callable[[Tensor], Tensor]
Gating = Callable[[Tensor, Tensor], Tensor]
Product = Callable[[Tensor, Tensor], Tensor]
"""Each expert's rows `[N, C]` times its matrix of `[e, D, C]`, transposed: `[N, D]`."""
Layout = Literal["separate", "fused", "interleaved"]
Weighted = Literal["outputs", "inputs"]


def clamped_swiglu(gate: Tensor, up: Tensor, *, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """`(up + 1) · gate · sigmoid(alpha · gate)` of clamped inputs: `gating` of GPT-OSS's experts."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


@dataclass(frozen=True)
class Expert:
    """A feed-forward expert: `down(activation(up(x)))`, or gated `down(activation(gate(x)) * up(x))`.

    | models | arguments |
    |---|---|
    | Switch Transformer | `Expert(H, I, activation=F.relu)` |
    | Mixtral, Qwen3-MoE, DeepSeek in transformers 5 | `Expert(H, I, gated=True, layout="fused")` |
    | GPT-OSS | as above with `layout="interleaved", transposed=True, bias=True, gating=clamped_swiglu` |
    | Llama 4 | as the second with `transposed=True, weighted="inputs"` |

    Args:
        hidden: H, width of a token.
        intermediate: I, inner width.
        gated: whether the expert has a gate in addition to `up`.
        bias: whether each matrix has a bias.
        layout: of gate and up: `separate` matrices `gate` and `up` of `[I, H]`; `fused` in one matrix `gate_up` of
            `[2I, H]`, the gate's rows first; or `interleaved`, rows of gate and up alternating.
        transposed: whether matrices are `[inputs, outputs]` instead of `[outputs, inputs]`.
        activation: elementwise, differentiable.
        gating: function of the gate's and up's outputs, `[N, I]` each, that replaces `activation(gate) * up`.
        fused_activation: function of the output of `gate_up`, `[N, 2I]` to `[N, I]`, that replaces both.
        weighted: tensors that the router's weights multiply: the experts' `outputs` or their `inputs`.

    Raises:
        ValueError: a size or an option is out of range; the message names it.
    """

    hidden: int
    intermediate: int
    _: KW_ONLY
    gated: bool = False
    bias: bool = False
    layout: Layout = "separate"
    transposed: bool = False
    activation: Activation = F.silu
    gating: Gating | None = None
    fused_activation: Activation | None = None
    weighted: Weighted = "outputs"

    def __post_init__(self) -> None:
        if min(self.hidden, self.intermediate) < 1:
            raise ValueError(
                f"Expert: expected positive sizes, got hidden={self.hidden}, intermediate={self.intermediate}"
            )
        for name in ("activation", "gating", "fused_activation"):
            function = getattr(self, name)
            if not callable(function) and (function is not None or name == "activation"):
                raise ValueError(
                    f"Expert: expected {name} to be a function such as torch.nn.functional.gelu, got {function!r}"
                )
        for name, kind in (("layout", Layout), ("weighted", Weighted)):
            if getattr(self, name) not in get_args(kind):
                raise ValueError(
                    f"Expert: expected {name} to be one of {', '.join(get_args(kind))}, got {getattr(self, name)!r}"
                )
        if not self.gated and (self.layout != "separate" or self.gating or self.fused_activation):
            raise ValueError("Expert: expected gated=True with a layout of gate and up, gating or fused_activation")
        if self.fused_activation and (self.gating or self.layout == "separate"):
            raise ValueError(
                "Expert: expected fused_activation without gating, and with layout='fused' or 'interleaved'"
            )

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the matrices and biases by name, in their order in an expert's row.

        Example: `Expert(4, 6, gated=True, bias=True, layout="fused").shapes` is `{"gate_up": (12, 4),
        "gate_up_bias": (12,), "down": (4, 6), "down_bias": (4,)}`.
        """
        width = self.intermediate
        outputs = {"up": width} if not self.gated else {"gate": width, "up": width}
        if self.layout != "separate":
            outputs = {"gate_up": 2 * width}
        found: dict[str, tuple[int, ...]] = {}
        for name, size in [*outputs.items(), ("down", self.hidden)]:
            inputs = width if name == "down" else self.hidden
            found[name] = (inputs, size) if self.transposed else (size, inputs)
            if self.bias:
                found[f"{name}_bias"] = (size,)
        return found

    @property
    def row_size(self) -> int:
        """W: elements of an expert's row, including the padding at its end."""
        used = sum(math.prod(shape) for shape in self.shapes.values())
        return used + -used % ROW_ALIGNMENT

    def settings(self) -> str:
        """Return the settings that change the result and do not show in the number of weights."""
        functions = {"activation": self.activation, "gating": self.gating, "fused_activation": self.fused_activation}
        named = {name: getattr(f, "__name__", type(f).__name__) for name, f in functions.items() if f is not None}
        if self.gating or self.fused_activation:
            named.pop("activation")
        others = {"layout": (self.layout, "separate"), "weighted": (self.weighted, "outputs")}
        named |= {name: value for name, (value, usual) in others.items() if value != usual}
        marks = [name for name in ("gated", "bias", "transposed") if getattr(self, name)]
        return ", ".join([*(f"{name}={value}" for name, value in named.items()), *marks])

    def views(self, weights_eW: Tensor) -> dict[str, Tensor]:
        """Return the matrices and biases of experts by name, `[e, *shape]` each, as views of their rows."""
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = weights_eW.split([*sizes, weights_eW.shape[1] - sum(sizes)], 1)
        return {name: part.unflatten(1, shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=False)}

    def matrices(self, row_W: Tensor) -> list[Tensor]:
        """Return the matrices of one expert as views `[outputs, inputs]` of its row, gate and up apart."""
        found = []
        for name, view in self.views(row_W[None]).items():
            if view.dim() == 2:  # a bias
                continue
            matrix = view[0].T if self.transposed else view[0]
            if name != "gate_up":
                found.append(matrix)
            elif self.layout == "fused":
                found += matrix.chunk(2)
            else:
                found += [matrix[::2], matrix[1::2]]
        return found

    @torch.no_grad()
    def initialize(self, weights_eW: Tensor) -> None:
        """Initialize experts as `nn.Linear` does: uniform within ±1/sqrt(inputs); zeros in the padding."""
        weights_eW.zero_()
        for name, view in self.views(weights_eW).items():
            inputs = self.intermediate if name.startswith("down") else self.hidden
            view.uniform_(-1 / math.sqrt(inputs), 1 / math.sqrt(inputs))

    def apply(self, rows_NH: Tensor, views: Mapping[str, Tensor], product: Product, ends_e: Tensor) -> Tensor:
        """Return the unweighted outputs of experts: `[N, H]` in the order of `rows_NH`.

        Args:
            rows_NH: ordered by expert; rows after the last expert's are padding.
            views: `[e, *shape]` for each name of `shapes`, in the rows' dtype.
            product: multiplies the rows with each expert's matrix.
            ends_e: int32, the end of each expert's rows.
        """
        owners_N = None
        if self.bias:
            numbers_N = torch.arange(len(rows_NH), dtype=ends_e.dtype, device=ends_e.device)
            owners_N = torch.searchsorted(ends_e, numbers_N, right=True)

        def linear(inputs_NC: Tensor, name: str) -> Tensor:
            matrices = views[name].transpose(1, 2) if self.transposed else views[name]
            outputs_ND = product(inputs_NC, matrices)
            if owners_N is None:
                return outputs_ND
            biases_eD = F.pad(views[f"{name}_bias"], (0, 0, 0, 1))  # the last one is for padding
            return outputs_ND + biases_eD[owners_N]

        if not self.gated:
            return linear(self.activation(linear(rows_NH, "up")), "down")
        if self.layout == "separate":
            return linear(self._join(linear(rows_NH, "gate"), linear(rows_NH, "up")), "down")
        both_N2I = linear(rows_NH, "gate_up")
        if self.fused_activation is not None:
            return linear(self.fused_activation(both_N2I), "down")
        if self.layout == "fused":
            gate_NI, up_NI = both_N2I.chunk(2, -1)
        else:
            gate_NI, up_NI = both_N2I[:, ::2], both_N2I[:, 1::2]
        return linear(self._join(gate_NI, up_NI), "down")

    def _join(self, gate_NI: Tensor, up_NI: Tensor) -> Tensor:
        return self.activation(gate_NI) * up_NI if self.gating is None else self.gating(gate_NI, up_NI)


def norm_rows(norm: nn.Module, outputs_NH: Tensor, ends_e: Tensor) -> Tensor:
    """Return the experts' outputs after a norm, which sees no padding: `[N, H]`, with zeros as padding.

    Args:
        norm: treats each row by itself.
        outputs_NH: ordered by expert; rows after the last expert's are padding.
        ends_e: int32, the end of each expert's rows.
    """
    numbers_N1 = torch.arange(len(outputs_NH), device=ends_e.device).unsqueeze(1)
    is_row_N1 = numbers_N1 < ends_e[-1]  # padding is uninitialized memory, and so are its gradients
    # A norm without eps turns a constant row into NaN, and NaN times a gradient of zero is NaN.
    harmless_H = (torch.arange(outputs_NH.shape[1], device=ends_e.device) % 2 + 1).to(outputs_NH.dtype)
    normed_NH = norm(outputs_NH.where(is_row_N1, harmless_H))
    found: Tensor = normed_NH.to(outputs_NH.dtype).where(is_row_N1, 0)
    return found
