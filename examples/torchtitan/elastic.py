"""Experts of evermoe in torchtitan's models: an override of its routed experts, and a `parallelize_fn`.

    config.override.imports.append("elastic.elastic_experts")
    config.model_spec.parallelize_fn = elastic.parallelize

A session owns the experts: their weights, optimizer state, placement and exchange of tokens. torchtitan runs with an
expert parallelism of 1, and FSDP2 does not see their weights. Shape suffixes are torchtitan's: B batch, L sequence, D
width, F inner width, K experts per token, E experts.
"""

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.override import derive, override
from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
from torchtitan.protocols.module import Module

import evermoe

NAMES = {"w1_EFD": "gate", "w3_EFD": "up", "w2_EDF": "down"}
"""Names of an expert's matrices in torchtitan and in evermoe."""


class ElasticExperts(evermoe.Experts, Module):
    """Experts of evermoe, made and initialised by torchtitan."""

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        """As torchtitan's."""

    def __init__(self, config):
        super().__init__(evermoe.Expert(config.dim, config.hidden_dim, gated=True), config.num_experts)

    @torch.no_grad()
    def _init_self_parameters(self):
        self.weights.zero_()
        views = self.expert.views(self.weights)
        for name, initialize in self._param_init.items():
            initialize(views[NAMES[name]])


class ElasticRoutedExperts(Module):
    """Routed experts of torchtitan, on any rank of a session."""

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """As torchtitan's; its dispatcher is not used."""

    def __init__(self, config):
        super().__init__()
        self.inner_experts = derive(config.inner_experts, ElasticExperts.Config).build()

    def forward(self, x_BLD, topk_scores_BLK, topk_expert_ids_BLK, _num_local_tokens_per_expert_E):
        """Return the weighted sum of the experts' outputs, `[B, L, D]`."""
        tokens, ids, scores = (each.flatten(0, 1) for each in (x_BLD, topk_expert_ids_BLK, topk_scores_BLK))
        is_mixed = x_BLD.dtype != torch.float32  # FSDP2 casts the weights that it has, and not those of experts
        with torch.autocast(x_BLD.device.type, x_BLD.dtype, enabled=is_mixed):
            return self.inner_experts(tokens, ids, scores.float()).view_as(x_BLD)


@override(target=RoutedExperts.Config)
def elastic_experts(config):
    """Replace torchtitan's routed experts."""
    return derive(config, ElasticRoutedExperts.Config)


def parallelize(model, *, parallel_dims, training, ac_config, dump_folder, **_):
    """Recompute activations as configured, and divide all but the experts by FSDP2, as `apply_fsdp_to_decoder` does."""
    experts = {each.weights for each in model.modules() if isinstance(each, evermoe.Experts)}
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if not parallel_dims.fsdp_enabled:
        return model
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
        reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
        cast_forward_inputs=False,
    )
    for part in (model.tok_embeddings, [model.norm, model.lm_head], *model.layers.values(), model):
        fully_shard(part, mesh=parallel_dims.get_mesh("fsdp"), mp_policy=policy, ignored_params=experts)
    return model


def balance_load(model):
    """Update the routers' biases by the load of all ranks, in place of torchtitan's hook, which sees its own world."""
    for layer in model.layers.values():
        if layer.moe_enabled and layer.moe.load_balance_coeff is not None:
            layer.moe.routed_experts.inner_experts.on_load = _follow_load(layer.moe)


def _follow_load(moe):
    @torch.no_grad()
    def follow(load_E):
        tokens_E = torch.from_numpy(load_E).to(moe.expert_bias_E)
        change_E = moe.load_balance_coeff * torch.sign(tokens_E.mean() - tokens_E)
        moe.expert_bias_E += change_E - change_E.mean()

    return follow
