"""Models of transformers made elastic record and replay their routing, as their own routers compute the weights."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
from evermoe import record_routing, replay_routing  # noqa: E402
from evermoe.integrations.transformers import make_elastic  # noqa: E402

BATCH, LENGTH, K = 3, 7, 2
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": K,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
MODELS = {
    "Qwen3Moe": {"moe_intermediate_size": 32, "head_dim": 8, "num_experts": 8},
    "Mixtral": {"num_local_experts": 8, "router_jitter_noise": 0.3},
    "GptOss": {"num_local_experts": 8, "head_dim": 8},
    "Glm4Moe": {  # one group, of which a router with groups chooses two experts for the group's score
        "moe_intermediate_size": 32,
        "head_dim": 8,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "num_experts_per_tok": 3,
    },
    "DeepseekV3": {
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        **LATENT,
    },
}
TOKENS = torch.randint(0, 64, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


def make(name, seed):
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**SIZES | MODELS[name])
    return make_elastic(transformers.AutoModelForCausalLM.from_config(config)).train()


def loss_of(model):
    torch.manual_seed(3)  # of the routers' noise
    return model(input_ids=TOKENS, labels=TOKENS).loss


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_routing_of_another_model_is_replayed(name):
    """With checkpointing the backward repeats forwards after the block."""
    rollout, model = make(name, 1), make(name, 2)
    layers = 1 if name == "DeepseekV3" else 2
    with record_routing(rollout) as routing:
        expected = loss_of(rollout)
    top_k = MODELS[name].get("num_experts_per_tok", K)
    assert routing.ids.shape == (BATCH * LENGTH, layers, top_k)
    with replay_routing(rollout, routing.ids):
        assert torch.equal(loss_of(rollout), expected)
    with record_routing(model) as own:
        loss_of(model)
    assert (own.ids != routing.ids).float().mean() > 0.5
    found = []
    for kind in (None, False, True):
        if kind is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind})
        with record_routing(model) as used, replay_routing(model, routing.ids.view(BATCH, LENGTH, layers, top_k)):
            loss = loss_of(model)
        found.append(gradients(model, loss))
        assert torch.equal(used.ids, routing.ids)
    routers = [name for name in found[0] if name.endswith(("gate.weight", "router.weight"))]
    assert len(routers) == layers and all(found[0][name].abs().max() > 1e-5 for name in routers)
    for other in found[1:]:
        torch.testing.assert_close(other, found[0])


@pytest.mark.parametrize("name", MODELS)
def test_a_generation_with_a_cache_has_the_routing_of_the_sequences(name):
    model = make(name, 1).eval()
    with record_routing(model) as routing:
        tokens = model.generate(TOKENS, attention_mask=torch.ones_like(TOKENS), max_new_tokens=5, do_sample=False)
    with record_routing(model) as complete, torch.no_grad():
        model(input_ids=tokens[:, :-1])
    assert torch.equal(routing.of_sequences(BATCH).ids, complete.ids)
