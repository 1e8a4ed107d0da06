"""Owners of what is not an expert: one rank has the optimizer's state of a unit, and it moves undivided."""

import pytest
import torch

from evermoe.state.training_state import TrainingState
from support.models import OPTIMIZERS, Tied, digests, everyone, read, train

OWNED = ["model", "embedding", "moe.router", "norm", "frozen"]
"""Units of which the optimizer steps something, or would if it were not frozen."""


def make(name, steps=0, model=None):
    model = model or Tied()
    optimizer = OPTIMIZERS[name](model.parameters())
    state = TrainingState(model, optimizer, is_sharded=True)
    train(model, optimizer, steps)
    return model, optimizer, state


def place(state, mine):
    """Rank 0 owns these units, rank 1 the others."""
    state.owners.place({unit: int(unit not in mine) for unit in state.owners.units})


def test_before_the_first_placement_every_rank_has_everything():
    _, _, state = make("adamw", steps=1)
    assert state.owners.units == OWNED
    assert state.held() == [unit.name for unit in state.catalog.units]
    assert all(ranks == (0, 1) for unit, ranks in state.active(2).items() if "experts" not in unit)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_unit_goes_to_its_owner_and_comes_back_with_the_same_bits(name):
    model, optimizer, state = make(name, steps=3)
    before, data, layouts = digests(state), read(state), {u.name: u.specs for u in state.catalog.units}
    place(state, {"embedding", "norm"})
    state.adopt(everyone(state), {}, rank=0)
    left = {"session", "embedding", "norm", *(f"moe.experts.{e}" for e in range(4))}
    assert digests(state) == {unit: before[unit] for unit in left}
    assert {unit: ranks for unit, ranks in state.active(2).items() if unit in OWNED} == {
        unit: (int(unit not in left),) for unit in OWNED
    }
    assert not optimizer.state.get(model.scale)
    assert torch.equal(model.scale, tensor_of(state, data, "model", "scale")), "the weights stay"
    model.scale.data.zero_()
    place(state, {"model", "moe.router", "frozen"})
    state.adopt(everyone(state), {unit: data[unit] for unit in ("model", "moe.router", "frozen")}, rank=0)
    left = {"session", "model", "moe.router", "frozen", *(f"moe.experts.{e}" for e in range(4))}
    assert digests(state) == {unit: before[unit] for unit in left}
    assert {u.name: u.specs for u in state.catalog.units} == layouts
    place(state, set(OWNED))
    state.adopt(everyone(state), {unit: data[unit] for unit in ("embedding", "norm")}, rank=0)
    assert digests(state) == before
    other_model, other_optimizer = Tied(), None
    other_optimizer = OPTIMIZERS[name](other_model.parameters())
    train(other_model, other_optimizer, 3)
    train(model, optimizer, 2, start=3)
    train(other_model, other_optimizer, 2, start=3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other_model.parameters(), strict=True))


def tensor_of(state, data, unit, name):
    return state.catalog.by_name[unit].tensors(data[unit])[name]


def test_a_unit_that_is_neither_held_nor_fetched_changes_nothing():
    _, optimizer, state = make("adamw", steps=1)
    place(state, {"embedding"})
    state.adopt(everyone(state), {}, rank=0)
    before, kept = digests(state), len(optimizer.state)
    place(state, {"norm"})
    with pytest.raises(KeyError, match="norm"):
        state.adopt({"moe.experts": [1]}, {}, rank=0)
    assert len(optimizer.state) == kept
    place(state, {"embedding"})
    assert digests(state) == before


def test_bytes_of_the_optimizer_fall_to_those_of_what_is_owned():
    model, optimizer, state = make("adamw")
    dense = {id(p) for p in state.dense}

    def nbytes():
        return sum(tensor.nbytes for p, state in optimizer.state.items() if id(p) in dense for tensor in state.values())

    total = nbytes()
    place(state, {"embedding"})
    state.adopt(everyone(state), {}, rank=0)
    assert nbytes() == sum(tensor.nbytes for tensor in optimizer.state[model.embedding.weight].values()) < total / 2


def test_strided_state_keeps_its_strides():
    model = Tied()
    model.frozen.weight = torch.nn.Parameter(torch.randn(8, 8).t(), requires_grad=False)
    _, optimizer, state = make("adamw-fused", steps=2, model=model)
    strides = optimizer.state[model.frozen.weight]["exp_avg"].stride()
    before, data = digests(state), read(state)
    place(state, set())
    state.adopt(everyone(state), {}, rank=0)
    place(state, set(OWNED))
    state.adopt(everyone(state), {unit: data[unit] for unit in OWNED}, rank=0)
    assert optimizer.state[model.frozen.weight]["exp_avg"].stride() == strides == (1, 8)
    assert digests(state) == before


def test_units_that_the_optimizer_does_not_step_have_no_owner():
    model = Tied()
    optimizer = torch.optim.AdamW(model.embedding.parameters())
    state = TrainingState(model, optimizer, is_sharded=True)
    assert state.owners.units == ["embedding"]
    assert TrainingState(model, optimizer).owners.units == []


def test_a_replica_node_knows_the_owners_and_holds_nothing():
    _, optimizer, state = make("adamw")
    state.release()
    place(state, {"embedding"})
    assert state.held() == ["session"]
    assert state.active(2)["embedding"] == (0,)
    assert state.active(2)["norm"] == (1,)
    assert not optimizer.state


def test_what_goes_to_another_owner_is_retained():
    """Until its copies are complete, nobody may have a second one."""
    _, _, state = make("adamw", steps=2)
    before, data = digests(state), read(state)
    place(state, {"embedding"})
    leaving = {unit: before[unit] for unit in OWNED if unit != "embedding"}
    state.retained.begin(7, set())
    state.adopt(everyone(state), {}, 0, leaving)
    kept = {each.unit: each for each in state.retained.stored(7)}
    assert kept.keys() == leaving.keys()
    assert all(torch.equal(each.data, data[unit]) and each.digest == before[unit] for unit, each in kept.items())
