"""Every experts module of transformers' interface equals `ElasticExperts`, and itself behind transformers' own seam."""

import copy
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from support.ranks import run_ranks

transformers = pytest.importorskip("transformers")
from evermoe import Expert, Experts  # noqa: E402
from evermoe.errors import UnsupportedState  # noqa: E402
from evermoe.integrations.transformers import make_elastic  # noqa: E402
from evermoe.integrations.transformers.elastic import ElasticExperts  # noqa: E402

H, INNER, EXPERTS, T, K = 16, 24, 5, 11, 3
CONFIG = {
    "hidden_size": H,
    "moe_hidden_size": H,
    "moe_latent_size": H,
    "intermediate_size": INNER,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "hidden_act": "silu",
    "hidden_activation": "gelu_pytorch_tanh",
    "mlp_hidden_act": "relu2",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 1.0,
    "post_norm_eps": 1e-6,
    "mlp_gate_softcap": 5.0,
    "mlp_up_softcap": 5.0,
    "_experts_implementation": "eager",
}
"""The fields of their configurations that the experts modules of all models read."""
MODELS = Path(transformers.__file__).parent / "models"


def classes():
    return list(_classes())


def _classes():
    for path in sorted(MODELS.glob("*/modeling_*.py")):
        for name in re.findall(r"@use_experts_implementation[^\n]*\nclass (\w+)", path.read_text()):
            yield pytest.param(f"{path.parent.name}.{path.stem}", name, id=name)


def make(module, name):
    torch.manual_seed(0)
    found = importlib.import_module(f"transformers.models.{module}")
    options = {"intermediate_size": INNER} if name == "Ernie4_5_VLMoeMoeExperts" else {}
    experts = getattr(found, name)(SimpleNamespace(**CONFIG), **options)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts


def inputs(seed=0):
    random = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(T, H, generator=random, requires_grad=True)
    weights_TK, ids_TK = torch.rand(T, EXPERTS, generator=random).topk(K)
    return x_TH, ids_TK, weights_TK.requires_grad_()


def run(experts, gradients):
    x_TH, ids_TK, weights_TK = inputs()
    out = experts(x_TH, ids_TK, weights_TK)
    out.square().sum().backward()
    return out.detach(), x_TH.grad, weights_TK.grad, gradients(experts)


def test_there_are_many():
    assert len(classes()) > 50


@pytest.mark.parametrize(("module", "name"), classes())
def test_elastic_experts_and_the_seam_are_equal_to_transformers(module, name):
    experts = make(module, name)
    seam, elastic = copy.deepcopy(experts), ElasticExperts(copy.deepcopy(experts))
    seam.config._experts_implementation = "evermoe"

    def plain(module):
        return {key: parameter.grad for key, parameter in module.named_parameters()}

    def by_name(layer):
        layer.weights.data = layer.weights.grad
        if layer.post_norm is not None:
            layer.post_norm.weight.data = layer.post_norm.weight.grad
        return layer.state_dict()

    expected = run(experts, plain)
    torch.testing.assert_close(run(seam, plain), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run(elastic, by_name), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["GptOssExperts", "MuseSparkExperts"])
def test_state_dicts_are_those_of_transformers(name):
    module = {"GptOssExperts": "gpt_oss.modeling_gpt_oss", "MuseSparkExperts": "muse_spark.modeling_muse_spark"}[name]
    source = make(module, name)
    state = {key: tensor.clone() for key, tensor in source.state_dict().items()}
    elastic = ElasticExperts(source)
    assert not list(source.parameters(recurse=False))
    torch.testing.assert_close(elastic.state_dict(), state, rtol=0, atol=0)
    other = ElasticExperts(make(module, name))
    nn.init.zeros_(other.weights)
    other.load_state_dict(state)
    assert torch.equal(other.weights, elastic.weights)
    make(module, name).load_state_dict(other.state_dict())
    again = copy.deepcopy(other)
    torch.testing.assert_close(again.state_dict(), state, rtol=0, atol=0)
    other.ids, other.weights = [1, 3], nn.Parameter(other.weights.detach()[[1, 3]].clone())
    nn.init.zeros_(other.weights)
    other.load_state_dict(state)
    assert torch.equal(other.weights, elastic.weights[[1, 3]])


def test_models_without_such_experts():
    with pytest.raises(ValueError, match="but no module of Linear is one"):
        make_elastic(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="Dense models go into a session as they are"):
        make_elastic(nn.Linear(2, 2))
    for module, name in (
        ("llama4.modeling_llama4", "Llama4TextExperts"),
        ("jetmoe.modeling_jetmoe", "JetMoeParallelExperts"),
    ):
        kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
        found = nn.Sequential(kind(SimpleNamespace(**CONFIG)) if "llama" in module else kind(2, 4, 4))
        with pytest.raises(ValueError, match=rf"Sequential has experts of its own kind, .*: {name} \(0\)"):
            make_elastic(found)
    model = nn.Sequential(Experts(Expert(4, 4), 2))
    assert make_elastic(model) is model
    mixed = make("mixtral.modeling_mixtral", "MixtralExperts")
    mixed.down_proj.requires_grad_(False)
    with pytest.raises(UnsupportedState, match="MixtralExperts: expected parameters of one floating-point type"):
        make_elastic(nn.Sequential(mixed))
    more = make("mixtral.modeling_mixtral", "MixtralExperts")
    more.extra = nn.Parameter(torch.zeros(2))
    with pytest.raises(UnsupportedState, match=r"has the parameters .*'extra'"):
        make_elastic(nn.Sequential(more))
    with pytest.raises(ValueError, match="expected balance_rate=None, as Sequential has no router"):
        make_elastic(nn.Sequential(make("mixtral.modeling_mixtral", "MixtralExperts")), balance_rate=1e-3)


# ---- expert parallelism of transformers


def on_rank(group, folder, name):
    """One of two ranks' half of the tokens and of the experts."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import EPImplementationInterface

    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/{name}", 2), rank=group.rank, world_size=2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("tp", "ep"))
    experts = make("qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts")
    rank, local = group.rank, 2
    for key, parameter in list(experts.named_parameters()):
        setattr(experts, key, nn.Parameter(parameter.detach()[rank * local : (rank + 1) * local].clone()))
    experts.num_experts, experts._is_expert_parallel = local, True
    dispatch = EPImplementationInterface()[name](experts, mesh["ep"], mesh["tp"])
    x_TH, ids_TK, weights_TK = (each.detach()[rank * 6 : rank * 6 + 5 + rank].clone() for each in inputs())
    ids_TK = ids_TK % (2 * local)
    x_TH.requires_grad_(), weights_TK.requires_grad_()
    out = dispatch(x_TH, ids_TK, weights_TK)
    out.square().sum().backward()
    return [out.detach(), x_TH.grad, weights_TK.grad, experts.gate_up_proj.grad, experts.down_proj.grad]


def test_dispatch_of_transformers_own_expert_parallelism(tmp_path):
    found, expected = (run_ranks(tmp_path, 2, on_rank, str(tmp_path), name) for name in ("evermoe", "all_to_all"))
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
