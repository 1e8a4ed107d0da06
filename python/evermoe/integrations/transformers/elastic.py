"""transformers' experts modules as `evermoe.Experts`: routers, shared experts and attention stay as they are."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations import moe as hub_moe

from evermoe.errors import UnsupportedState
from evermoe.integrations.transformers.adapters import Wrapper, adapt, changed
from evermoe.integrations.transformers.own_kinds import declare
from evermoe.integrations.transformers.quantised import save_dequantised
from evermoe.integrations.transformers.router_loss import span_members
from evermoe.moe.expert import Expert, Layout
from evermoe.moe.experts import Experts, expert_layers
from evermoe.moe.router import follow_load
from evermoe.moe.routing import watch_routers

DEQUANTISE = (
    "Load a quantised model with quantization_config=Mxfp4Config(dequantize=True) or FineGrainedFP8Config("
    "dequantize=True), or by evermoe.integrations.transformers.from_pretrained"
)
BIASES = ("e_score_correction_bias", "expert_bias")
"""Names that models give to the bias that is added to the scores for the choice alone."""


def describe(source: nn.Module) -> Expert:
    """Return the kind of expert that a module of transformers' experts interface has.

    Args:
        source: of a class with `@use_experts_implementation`.
    """
    found: Any = source
    inner, hidden = found.down_proj.shape[1:] if found.is_transposed else found.down_proj.shape[:0:-1]
    options: dict[str, Any] = {"bias": found.has_bias, "transposed": found.is_transposed}
    if not found.has_gate:
        return Expert(hidden, inner, activation=found.act_fn, **options)
    layout: Layout = "fused" if found.is_concatenated else "interleaved"
    if found._apply_gate.__func__ is hub_moe._default_apply_gate and found.is_concatenated:
        return Expert(hidden, inner, gated=True, layout="fused", activation=found.act_fn, **options)
    return Expert(hidden, inner, gated=True, layout=layout, fused_activation=found._apply_gate, **options)


class ElasticExperts(Experts):
    """The experts of a transformers model, spread over the members of a session.

    It takes over the weights of `source`, which has none afterwards. `state_dict` has transformers' names and
    shapes, and `load_state_dict` takes them. So `save_pretrained` works for a model that holds all its experts.

    Raises:
        UnsupportedState: it has unknown parameters, or parameters of several types.
    """

    def __init__(self, source: Any, **options: Any) -> None:
        expert, kind = describe(source), type(source).__name__
        parameters = dict(source.named_parameters(recurse=False))
        if {hub_name(name) for name in expert.shapes} != set(parameters):
            raise UnsupportedState(
                f"{kind} has the parameters {sorted(parameters)}, and experts of transformers' interface have "
                f"{sorted(hub_name(name) for name in expert.shapes)}: it cannot be made elastic"
            )
        devices = {p.device for p in parameters.values() if not p.is_meta}  # a deferred model has memory for small ones
        types = {(p.dtype, p.requires_grad) for p in parameters.values()}
        if len(types) > 1 or len(devices) > 1 or not next(iter(types))[0].is_floating_point:
            raise UnsupportedState(
                f"{kind}: expected parameters of one floating-point type, on one device, all frozen or none; got "
                f"{sorted(map(str, types | devices))}. {DEQUANTISE}"
            )
        ((dtype, requires_grad),) = types
        device = next(iter(devices), torch.device("meta"))
        norm = getattr(source, "post_expert_norm", None)
        super().__init__(expert, source.num_experts, post_norm=norm, device="meta", dtype=dtype, **options)
        self.kind = kind
        self._stack_names = {hub_name(name): name for name in expert.shapes}
        self.share_E = torch.zeros(self.num_experts, device=device)
        weights = torch.empty(self.weights.shape, device=device, dtype=dtype)
        with torch.no_grad():
            weights[:, sum(p[0].numel() for p in parameters.values()) :] = 0
            for name, view in expert.views(weights).items():
                view.copy_(parameters[hub_name(name)])
                source._parameters.pop(hub_name(name))
        self.weights = nn.Parameter(weights, requires_grad)
        self.is_transposed = expert.transposed
        """As transformers' module says it."""
        self.wrappers: list[Wrapper] = []
        """peft's, around this one."""
        self.register_state_dict_post_hook(_as_hub)
        self.register_load_state_dict_pre_hook(_from_hub)

    def reset_parameters(self) -> None:
        """Leave the weights as they are: transformers draws those of its models."""

    def extra_repr(self) -> str:
        """Return the text that `print(layer)` shows."""
        return f"{self.kind}, {super().extra_repr()}"

    def __getattr__(self, name: str) -> Any:
        """Return a stack by transformers' name, such as `gate_up_proj`, as a view of the local experts' weights."""
        if name in self.__dict__.get("_stack_names", {}):
            return self.expert.views(self.weights)[self._stack_names[name]]
        return super().__getattr__(name)

    @property
    def adaptable(self) -> list[str]:
        """Transformers' names of the matrices, which peft's LoRA can adapt."""
        return [name for name, own in self._stack_names.items() if len(self.expert.shapes[own]) == 2]

    def _matrices(self, dtype: torch.dtype) -> dict[str, Tensor]:
        found = super()._matrices(dtype)
        return changed(found, {self._stack_names[each.parameter_name]: each for each in self.wrappers})

    @property
    def adapted(self) -> set[str]:
        """Names of the matrices that have adapters."""
        return {each.parameter_name for each in self.wrappers}

    @property
    def adapted_parameters(self) -> int:
        """Parameters of one expert in these matrices."""
        return sum(math.prod(self.expert.shapes[self._stack_names[name]]) for name in self.adapted)


def hub_name(name: str) -> str:
    """Return transformers' name of a matrix or bias: `gate_up_proj_bias` for `gate_up_bias`."""
    matrix = name.removesuffix("_bias")
    return f"{matrix}_proj_bias" if matrix != name else f"{matrix}_proj"


def _as_hub(layer: Experts, state: dict[str, Any], prefix: str, metadata: dict[str, Any]) -> None:
    for name, view in layer.expert.views(state.pop(f"{prefix}weights")).items():
        state[f"{prefix}{hub_name(name)}"] = view.contiguous()  # savers treat tensors that share memory as tied
    for key in [key for key in state if key.startswith(f"{prefix}post_norm.")]:
        state[key.replace(f"{prefix}post_norm.", f"{prefix}post_expert_norm.")] = state.pop(key)


def _from_hub(layer: Experts, state: dict[str, Any], prefix: str, *_: Any) -> None:
    names = {name: f"{prefix}{hub_name(name)}" for name in layer.expert.shapes}
    if not all(key in state for key in names.values()):
        return
    first = state[next(iter(names.values()))]
    rows: Any = layer.ids if len(first) == layer.num_experts else slice(None)
    weights = first.new_zeros(len(first[rows]), layer.expert.row_size)
    for name, view in layer.expert.views(weights).items():
        view.copy_(state.pop(names[name])[rows])
    state[f"{prefix}weights"] = weights
    for key in [key for key in state if key.startswith(f"{prefix}post_expert_norm.")]:
        state[key.replace(f"{prefix}post_expert_norm.", f"{prefix}post_norm.")] = state.pop(key)


def is_hub_experts(module: nn.Module) -> bool:
    """Return whether a module is one of transformers' experts interface."""
    return all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "_apply_gate", "down_proj"))


def make_elastic(model: nn.Module, *, balance_rate: float | None = None, **options: Any) -> nn.Module:
    """Replace all experts modules of a transformers model by `ElasticExperts`, in place, and return it.

    Call it before you make the optimizer, and after peft's `get_peft_model` if that adapts experts. It copies one layer
    at a time. The balancing loss that a model adds with `output_router_logits` is then over the tokens of all members:
    see `router_loss`.

    Args:
        model: any whose experts use transformers' experts interface, Llama 4's or Step 3.7's; or peft's around one.
        balance_rate: step by which a session moves the bias of a router's scores for the choice
            (`e_score_correction_bias`) after each step: up for experts with fewer tokens than the mean, down for others
            (DeepSeek-V3, section 2.1.2). None: the bias stays.
        options: of `evermoe.Experts`: `token_split`, `max_tokens`, `fp8_dispatch`.

    Raises:
        ValueError: no module uses the interface, or `balance_rate` is given and no router has such numbers.
        UnsupportedState: as of `ElasticExperts`; or an adapter changes experts otherwise than LoRA of their matrices.
    """
    children = [(parent, name, child) for parent in model.modules() for name, child in parent.named_children()]
    for parent, _, child in children:
        declare(parent, child)
    devices = [each for each in children if is_hub_experts(each[2])]
    if not devices and not expert_layers(model):
        raise _no_experts(model)
    balances, parents = 0, {child: parent for parent in model.modules() for child in parent.children()}
    for parent, name, child in devices:
        experts = ElasticExperts(child, **options)
        setattr(parent, name, experts)
        block = parent
        while "base_layer" in block._modules:  # an adapter around the experts
            block = parents[block]
        biases = {id(tensor): tensor for key, tensor in _tensors(block) if key.rpartition(".")[2] in BIASES}
        if balance_rate is not None and biases:
            (bias,) = biases.values()
            experts.on_load = Balance(bias, balance_rate)
            balances += 1
    if balance_rate is not None and not balances:
        raise ValueError(
            f"make_elastic: expected balance_rate=None, as {type(model).__name__} has no router with "
            f"{' or '.join(BIASES)}"
        )
    span_members(model)
    watch_routers(model)
    layers = [layer for layer in model.modules() if isinstance(layer, ElasticExperts)]
    wrappers = adapt(model, {layer: layer.adaptable for layer in layers})
    for layer in layers:
        layer.wrappers = [wrapper for base, wrapper in wrappers if base is layer]
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            save_dequantised(module)
    return model


def _no_experts(model: nn.Module) -> ValueError:
    """Return the error for a model without experts of the interface. It names modules that look like experts."""
    kinds = {
        type(part).__name__: name for name, part in reversed([*model.named_modules()]) if _seems_experts(name, part)
    }
    expected = "make_elastic: expected a model with experts of transformers' experts interface"
    if not kinds:
        return ValueError(
            f"{expected}, but no module of {type(model).__name__} is one. Dense models go into a session as they are"
        )
    found = ", ".join(f"{kind} ({name or 'the model itself'})" for kind, name in sorted(kinds.items()))
    return ValueError(
        f"{expected}, but {type(model).__name__} has experts of its own kind, which are not supported yet: {found}. As "
        "part of a session they would be replicated on every member, not spread"
        + (f". {DEQUANTISE}" if any(getattr(module, "is_quantized", False) for module in model.modules()) else "")
    )


def _seems_experts(name: str, module: nn.Module) -> bool:
    """Return whether a module with parameters is called experts, or an MoE layer, by its class or by the model."""
    kind = type(module).__name__.lower()
    is_named = "expert" in kind or kind.endswith(("moe", "moeblock")) or name.rpartition(".")[2] == "experts"
    return is_named and any(True for _ in module.parameters())


class Balance:
    """Moves a router's numbers `bias`, `[E]`, by the load of its experts."""

    def __init__(self, bias: Tensor, rate: float) -> None:
        self._bias, self._rate = bias, rate

    @torch.no_grad()
    def __call__(self, load_E: NDArray[np.int64]) -> None:
        """Move them once: up where the load is less than the mean, down where it is more."""
        follow_load(self._bias, load_E, self._rate)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
