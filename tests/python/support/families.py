"""Tiny models of all MoE families of transformers, with random weights, by the name of their folder in transformers."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from support.hub import VOCABULARY

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "sliding_window": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # experts
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    # latent attention
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
"""Fields of the configurations of text models, where a family has them."""
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "depth": 2,
    "num_heads": 4,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "patch_size": 4,
    "image_size": 16,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "vision_output_dim": 32,
    "projector_input_dim": 32,
    "projector_output_dim": 32,
}
"""The same of vision parts."""
LATENT = {"num_key_value_heads": 4}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
OPTIONS: dict[str, dict[str, Any]] = {
    "bailing_hybrid": LATENT | {"layer_group_size": 2},
    "beam": {"mlp_layer_types": ["dense", "sparse"]},
    "flint": {"mlp_only_layers": [0]},
    "gemma4": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "vocab_size_per_layer_input": VOCABULARY,
        "hidden_size_per_layer_input": 8,
    },
    "glm4v_moe": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
        }
    },
    "granitemoehybrid": MIXED | {"mamba_n_heads": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "kimi_linear": LATENT | MIXED | {"linear_head_dim": 8, "linear_num_heads": 4},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    "llama4": {"interleave_moe_layer_step": 1, "num_experts_per_tok": 2},
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 16,
        "chunk_size": 8,
    },
    "qwen3_5_moe": MIXED,
    "qwen3_next": MIXED,
    "step3p7": {"mlp_layer_types": ["dense", "sparse"]},
    "zaya": {"num_experts_per_tok": 1},
} | dict.fromkeys(
    (
        "axk1",
        "axk2",
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "dots3_note",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "mistral4",
    ),
    LATENT,
)
"""Fields of families whose architecture needs other values."""
CLASSES = {
    "gemma4": "Gemma4ForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
    "openai_privacy_filter": "OpenAIPrivacyFilterForTokenClassification",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "step3p7": "Step3p7ForConditionalGeneration",
}
"""Models other than causal language models. Those with a vision part read text alone here."""


def class_of(family: str) -> Any:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    names = [CLASSES[family]] if family in CLASSES else [name for name in vars(module) if name.endswith("ForCausalLM")]
    return next(getattr(module, name) for name in names if getattr(module, name).__module__ == module.__name__)


def _with(kind: Any, values: dict[str, Any]) -> Any:
    """Return a configuration with the values for which it has fields."""
    fields = {field for base in kind.__mro__ for field in vars(base).get("__annotations__", ())}
    known = fields | set(inspect.signature(kind.__init__).parameters)
    return kind(**{name: value for name, value in values.items() if name in known})


def config_of(family: str) -> Any:
    kind, text = class_of(family).config_class, SMALL | OPTIONS.get(family, {})
    parts = {name: part for name, part in kind.sub_configs.items() if part.__name__ != "AutoConfig"}
    if not parts:
        return _with(kind, text)
    return kind(**{name: _with(part, text if "text" in name else VISION).to_dict() for name, part in parts.items()})


def build_family(family: str) -> Any:
    return class_of(family)(config_of(family))
