"""transformers' MoE models, tiny and with random weights; nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY = 32
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
QWEN3 = {
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "head_dim": 8,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("MixtralConfig", {"intermediate_size": 48, "num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen3": ("Qwen3MoeConfig", QWEN3 | {"norm_topk_prob": True}),
    "qwen3-not-normalized": ("Qwen3MoeConfig", QWEN3 | {"norm_topk_prob": False}),
    "deepseek-v3": ("DeepseekV3Config", DEEPSEEK),
    "gpt-oss": (
        "GptOssConfig",
        {
            "intermediate_size": 24,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "head_dim": 8,
            "sliding_window": 8,
        },
    ),
    "olmoe": ("OlmoeConfig", {"intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}),
}
BALANCED = "mixtral, balanced"
"""With a balancing loss, and every token 0 padding."""


def config(name: str, **more: Any) -> Any:
    import transformers

    kind, options = MODELS[name.partition(",")[0]]
    if name == BALANCED:
        more |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    return getattr(transformers, kind)(**COMMON | options | more)


def build(name: str, seed: int = 0, **more: Any) -> Any:
    """A model whose routers choose, and whose biases do something."""
    from transformers import AutoModelForCausalLM

    from support.families import build_family

    torch.manual_seed(seed)
    is_here = name.partition(",")[0] in MODELS
    model = AutoModelForCausalLM.from_config(config(name, **more)) if is_here else build_family(name)
    with torch.no_grad():
        for key, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "router" in key or "mlp.gate.weight" in key or key.endswith("bias"):
                tensor.normal_(0, 0.2)
    return model


def labels_of(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Labels that a model with its head can learn from the tokens."""
    head = type(model).__name__.rpartition("For")[2]
    if head == "QuestionAnswering":
        return {"start_positions": tokens[:, 0] % tokens.shape[1], "end_positions": tokens[:, 1] % tokens.shape[1]}
    by_head = {"TokenClassification": tokens % 2, "SequenceClassification": tokens.sum(1) % 2}
    return {"labels": by_head.get(head, tokens)}


class Loss(nn.Module):
    """The training of a worker: the loss of a language model, or of a classifier of even and odd numbers."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        model: Any = self.model
        mask = (tokens != 0).long() if getattr(model.config, "output_router_logits", False) else None
        return model(input_ids=tokens, attention_mask=mask, **labels_of(model, tokens)).loss  # type: ignore[no-any-return]


def elastic(name: str) -> nn.Module:
    """The model as a worker trains it."""
    from evermoe.integrations.transformers import make_elastic

    return make_elastic(Loss(build(name)), balance_rate=1e-3 if name == "deepseek-v3" else None)


def open_folder(folder: str) -> tuple[nn.Module, Any]:
    """The deferred model of a folder in float32, as a worker trains it, and the source of its weights."""
    from evermoe.integrations.transformers import from_pretrained

    model, weights = from_pretrained(folder, dtype=torch.float32)
    return Loss(model), weights
