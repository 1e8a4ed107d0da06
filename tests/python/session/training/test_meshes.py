"""Meshes, optimizers and options that a session with islands refuses by name, in a world of one process."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import evermoe
from evermoe.errors import UnsupportedState
from evermoe.session.islands import Place, find_place
from evermoe.session.session_config import session_config


@pytest.fixture
def world():
    """Make a mesh with dimensions of these names, each of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield lambda *names: init_device_mesh("cpu", (1,) * len(names), mesh_dim_names=names)
    dist.destroy_process_group()


def build(mesh, *, with_experts=False):
    model = nn.Sequential(nn.Linear(8, 8), evermoe.MoE(8, 8, 4))
    experts = set() if with_experts else {model[1].experts.weights}
    fully_shard(model, mesh=mesh, ignored_params=experts)
    return model


def start(mesh, model=None, optimizer=None, **options):
    model = build(mesh) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer(model)
    return evermoe.Session(model, optimizer, evermoe.ElasticSampler(64, 8), mesh=mesh, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shard_optimizer": True}, "shard_optimizer and mesh"),
        ({"on_gradients": print}, "on_gradients and mesh"),
        ({"preset": "pec", "checkpoints": "somewhere"}, "preset pec and mesh"),
    ],
)
def test_options_that_islands_do_not_support(world, options, words):
    with pytest.raises(ValueError, match=words):
        session_config(mesh=world("dp"), **options)


def test_a_mesh_is_a_device_mesh():
    with pytest.raises(ValueError, match="mesh"):
        session_config(mesh="dp")


def test_replica_nodes_are_single_processes(world):
    with pytest.raises(ValueError, match="members of islands train: expected role train, got 'replica'"):
        start(world("dp"), membership=evermoe.Membership(role="replica"))


@pytest.mark.parametrize("name", ["pp", "ep", "something"])
def test_unknown_dimensions_are_refused(world, name):
    with pytest.raises(UnsupportedState, match=f"the dimension {name} is none of dp, .*tp, cp"):
        start(world("dp", name))


def test_experts_are_left_out_of_fully_shard(world):
    mesh = world("dp")
    with pytest.raises(UnsupportedState, match=r"experts.weights has the experts of a layer .* ignored_params"):
        start(mesh, build(mesh, with_experts=True))


def test_fsdp_needs_a_mesh(world):
    model = build(world("dp"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedState, match="FSDPModule"):
        evermoe.Session(model, optimizer, evermoe.ElasticSampler(64, 8))


def muon(model):
    matrices = [each for each in model.parameters() if each.dim() == 2]
    return evermoe.optim.Muon(matrices, lr=0.1)


def test_optimizers_that_mix_rows_are_refused(world):
    mesh = world("dp")
    with pytest.raises(UnsupportedState, match="Muon mixes the rows of a parameter, of which each process"):
        start(mesh, optimizer=muon)


def averaged(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    evermoe.optim.EMA(optimizer)
    return optimizer


def test_averages_are_refused(world):
    with pytest.raises(UnsupportedState, match=r"mesh and evermoe.optim.EMA"):
        start(world("dp"), optimizer=averaged)


def stepped(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    return optimizer


def test_optimizers_that_have_stepped_are_refused(world):
    with pytest.raises(UnsupportedState, match="AdamW has state of DTensors"):
        start(world("dp"), optimizer=stepped)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("dp_replicate", "dp_shard"), Place(1, 0, 1, 1, 1)),
        (("dp", "cp", "tp"), Place(1, 0, 1, 1, 1)),
    ],
)
def test_places(world, names, expected):
    assert find_place(world(*names)) == expected


def test_data_parallel_groups_are_counted_over_islands():
    place = Place(island=8, group=1, groups=2, copies=2, parts=2)
    assert [place.of(rank, 24) for rank in (4, 12, 20)] == [(1, 6), (3, 6), (5, 6)]
    assert Place().of(3, 5) == (3, 5)
