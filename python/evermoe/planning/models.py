"""Sizes of known MoE models, from their published configurations: what of them is an expert's, and what is not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from evermoe.planning._arguments import count

PIECES = 4
"""Modules of a layer into which its dense part is divided here, in addition to the model's largest ones."""
LARGEST_MODULES = 2
"""Modules of a model that are as large as its largest: embedding and output."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Parameters of a model, by what a session does with them."""

    dense_parameters: int
    """Parameters that every token passes: attention, norms, embeddings, routers, shared experts. Tied ones once."""
    largest_module: int
    """Of those that are trained, parameters of the largest module, which has one owner where these are sharded."""
    layers: int
    """Number of MoE layers."""
    experts: int
    """Experts of each of them."""
    expert_parameters: int
    """Parameters of one expert."""
    source: str = ""
    """Where the sizes are from."""
    frozen_layers: int = 0
    """MoE layers whose experts are frozen: they take no gradients, and the optimizer does not have them."""
    frozen_dense_parameters: int = 0
    """Of `dense_parameters`, those that are frozen."""
    largest_frozen_module: int = 0
    """Of these, parameters of the largest module."""
    adapted_expert_parameters: int = 0
    """Parameters of an expert in matrices that adapters change, in each MoE layer."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name != "source":
                count(field.name, getattr(self, field.name))
        for name in ("layers", "experts", "expert_parameters"):
            if not getattr(self, name):
                raise ValueError(f"{name}: expected 1 or more, got 0: a model without experts is no MoE model")
        for name, limit, most in (
            ("frozen_layers", "layers", self.layers),
            ("frozen_dense_parameters", "dense_parameters", self.dense_parameters),
            ("largest_frozen_module", "frozen_dense_parameters", self.frozen_dense_parameters),
            ("largest_module", "the trained ones of dense_parameters", self.trained_dense_parameters),
            ("adapted_expert_parameters", "expert_parameters", self.expert_parameters),
        ):
            if getattr(self, name) > most:
                raise ValueError(f"{name}: expected at most {limit}, {most}, got {getattr(self, name)}")
        if not self.trained_parameters:
            raise ValueError("the model is frozen: expected parameters that are trained, such as those of adapters")

    @property
    def parameters(self) -> int:
        """All parameters."""
        return self.dense_parameters + self.layers * self.experts * self.expert_parameters

    @property
    def trained_dense_parameters(self) -> int:
        """Of `dense_parameters`, those that are trained."""
        return self.dense_parameters - self.frozen_dense_parameters

    @property
    def trained_parameters(self) -> int:
        """All parameters that are trained."""
        layers = self.layers - self.frozen_layers
        return self.trained_dense_parameters + layers * self.experts * self.expert_parameters

    def with_frozen_experts(self) -> ModelShape:
        """Return the model with frozen experts."""
        return replace(self, frozen_layers=self.layers)

    def with_frozen_dense(self) -> ModelShape:
        """Return the model of which experts alone are trained."""
        return replace(
            self,
            frozen_dense_parameters=self.dense_parameters,
            largest_frozen_module=max(self.largest_module, self.largest_frozen_module),
            largest_module=0,
        )

    def with_adapters(self, parameters: int, *, are_of_experts: bool = False) -> ModelShape:
        """Return the frozen model with adapters such as those of LoRA, which are trained on every worker.

        >>> small = ModelShape(dense_parameters=1000, largest_module=400, layers=3, experts=8, expert_parameters=500)
        >>> tuned = small.with_adapters(60)
        >>> tuned.parameters, tuned.trained_parameters
        (13060, 60)

        Args:
            parameters: of all adapters, those of experts included.
            are_of_experts: whether adapters change the matrices of experts, too.
        """
        frozen = self.dense_parameters
        return replace(
            self,
            dense_parameters=frozen + parameters,
            largest_module=0,
            frozen_layers=self.layers,
            frozen_dense_parameters=frozen,
            largest_frozen_module=max(self.largest_module, self.largest_frozen_module),
            adapted_expert_parameters=self.expert_parameters if are_of_experts else 0,
        )


def dense_modules(dense_parameters: int, largest_module: int, layers: int) -> list[int]:
    """Parameters of what is no expert, by module: the largest ones, then equal ones for the rest.

        >>> dense_modules(1000, largest_module=400, layers=1)
        [400, 400, 50, 50, 50, 50]

    Args:
        dense_parameters: all of them.
        largest_module: those of the largest module; 0 where it is not known, and all are equal.
        layers: MoE layers.
    """
    largest = [largest_module] * min(LARGEST_MODULES, dense_parameters // largest_module if largest_module else 0)
    rest, number = dense_parameters - sum(largest), PIECES * layers
    if largest_module:
        number = max(number, -(-rest // largest_module))
    pieces = [rest * (i + 1) // number - rest * i // number for i in range(number)]
    return [*largest, *(each for each in pieces if each)]


def _grouped_attention(hidden: int, heads: int, groups: int, head: int) -> int:
    """Parameters of attention with fewer heads for keys and values than for queries: four matrices."""
    return 2 * hidden * (heads + groups) * head


def _latent_attention(hidden: int, heads: int, query: int, key: int, head: int, rotary: int) -> int:
    """Parameters of multi-head latent attention (DeepSeek-V2, section 2.1), with norms of the latent vectors.

    Args:
        hidden: width of the model.
        heads: number of heads.
        query: width of the queries' latent vector.
        key: width of that of keys and values.
        head: width of a head's keys without position, and of its values.
        rotary: width of the part of keys with position.
    """
    queries = hidden * query + query + query * heads * (head + rotary)
    keys = hidden * (key + rotary) + key + key * heads * 2 * head
    return queries + keys + heads * head * hidden


def _shape(
    source: str, *, vocabulary: int, hidden: int, layers: int, experts: int, expert: int, layer: int, rest: int = 0
) -> ModelShape:
    """Return a decoder with an embedding and a separate output matrix.

    Parameters: `expert` of one expert, `layer` of an MoE layer without them, `rest` of what is in no MoE layer,
    embedding or output: the last norm, dense layers.
    """
    return ModelShape(
        dense_parameters=2 * vocabulary * hidden + layers * layer + rest,
        largest_module=vocabulary * hidden,
        layers=layers,
        experts=experts,
        expert_parameters=expert,
        source=source,
    )


def _mixtral(source: str, *, vocabulary: int, hidden: int, inner: int, layers: int, heads: int) -> ModelShape:
    attention = _grouped_attention(hidden, heads, 8, 128)
    layer = attention + 2 * hidden + 8 * hidden  # with two norms and the router
    sizes = {"vocabulary": vocabulary, "hidden": hidden, "layers": layers, "layer": layer, "rest": hidden}
    return _shape(source, experts=8, expert=3 * hidden * inner, **sizes)


def _qwen3(source: str, *, hidden: int, inner: int, layers: int, heads: int) -> ModelShape:
    attention = _grouped_attention(hidden, heads, 4, 128) + 2 * 128  # with norms of queries and keys
    layer = attention + 2 * hidden + 128 * hidden
    sizes = {"vocabulary": 151_936, "hidden": hidden, "layers": layers, "layer": layer, "rest": hidden}
    return _shape(source, experts=128, expert=3 * hidden * inner, **sizes)


def _deepseek_v3() -> ModelShape:
    hidden, inner, experts = 7168, 2048, 256
    attention = _latent_attention(hidden, heads=128, query=1536, key=512, head=128, rotary=64)
    every = attention + 2 * hidden
    layer = every + experts * hidden + 3 * hidden * inner  # with the router and one shared expert
    return _shape(
        "arXiv 2412.19437, section 4.2, without the module that predicts a second token",
        vocabulary=129_280,
        hidden=hidden,
        layers=58,
        experts=experts,
        expert=3 * hidden * inner,
        layer=layer,
        rest=hidden + 3 * (every + 3 * hidden * 18_432),
    )


def _gpt_oss(source: str, *, layers: int, experts: int) -> ModelShape:
    hidden, heads, groups, head = 2880, 64, 8, 64
    biases = (heads + 2 * groups) * head + hidden
    attention = _grouped_attention(hidden, heads, groups, head) + biases + heads  # with a sink of each head
    layer = attention + 2 * hidden + experts * (hidden + 1)
    expert = 3 * hidden * hidden + 3 * hidden
    sizes = {"vocabulary": 201_088, "hidden": hidden, "layers": layers, "layer": layer, "rest": hidden}
    return _shape(source, experts=experts, expert=expert, **sizes)


def _gpt2_moe(*, hidden: int, experts: int) -> ModelShape:
    """GPT-2 with experts in the place of each feed-forward: Lazarus, Table 1. The output matrix is the embedding."""
    vocabulary, positions, layers = 50_257, 1024, 12
    attention = 4 * hidden * hidden + 4 * hidden
    layer = attention + 4 * hidden + experts * hidden  # with two norms and the router
    return ModelShape(
        dense_parameters=(vocabulary + positions) * hidden + layers * layer + 2 * hidden,
        largest_module=vocabulary * hidden,
        layers=layers,
        experts=experts,
        expert_parameters=8 * hidden * hidden + 5 * hidden,
        source="Lazarus, Table 1",
    )


MODELS: Mapping[str, ModelShape] = {
    "gpt-s-moe": _gpt2_moe(hidden=768, experts=8),
    "gpt-m-moe": _gpt2_moe(hidden=1024, experts=12),
    "gpt-l-moe": _gpt2_moe(hidden=1024, experts=16),
    "mixtral-8x7b": _mixtral(
        "mistralai/Mixtral-8x7B-v0.1", vocabulary=32_000, hidden=4096, inner=14_336, layers=32, heads=32
    ),
    "mixtral-8x22b": _mixtral(
        "mistralai/Mixtral-8x22B-v0.1", vocabulary=32_000, hidden=6144, inner=16_384, layers=56, heads=48
    ),
    "qwen3-30b-a3b": _qwen3("Qwen/Qwen3-30B-A3B", hidden=2048, inner=768, layers=48, heads=32),
    "qwen3-235b-a22b": _qwen3("Qwen/Qwen3-235B-A22B", hidden=4096, inner=1536, layers=94, heads=64),
    "deepseek-v3": _deepseek_v3(),
    "gpt-oss-20b": _gpt_oss("openai/gpt-oss-20b", layers=24, experts=32),
    "gpt-oss-120b": _gpt_oss("openai/gpt-oss-120b", layers=36, experts=128),
}
"""Sizes by name, as `evermoe plan --model` knows them."""


HUB_NAMES: Mapping[str, tuple[str, ...]] = {
    "mixtral-8x7b": ("mistralai/Mixtral-8x7B-v0.1", "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "mixtral-8x22b": ("mistralai/Mixtral-8x22B-v0.1", "mistralai/Mixtral-8x22B-Instruct-v0.1"),
    "qwen3-30b-a3b": (
        "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen3-30B-A3B-Base",
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "Qwen/Qwen3-30B-A3B-Thinking-2507",
    ),
    "qwen3-235b-a22b": (
        "Qwen/Qwen3-235B-A22B",
        "Qwen/Qwen3-235B-A22B-Instruct-2507",
        "Qwen/Qwen3-235B-A22B-Thinking-2507",
    ),
    "deepseek-v3": (
        "deepseek-ai/DeepSeek-V3",
        "deepseek-ai/DeepSeek-V3-Base",
        "deepseek-ai/DeepSeek-V3-0324",
        "deepseek-ai/DeepSeek-R1",
    ),
    "gpt-oss-20b": ("openai/gpt-oss-20b",),
    "gpt-oss-120b": ("openai/gpt-oss-120b",),
}
"""Names on the hub of models with these sizes."""


def find_model(name: str) -> ModelShape | None:
    """Return the sizes of a model, by its name in `MODELS` or on the hub, in any case; None where it is not known.

    >>> find_model("deepseek-ai/DeepSeek-V3") is MODELS["deepseek-v3"]
    True
    """
    wanted = name.lower()
    by_hub = {each.lower(): known for known, names in HUB_NAMES.items() for each in names}
    return MODELS.get(by_hub.get(wanted, wanted))
