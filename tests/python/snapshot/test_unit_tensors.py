"""Lists of tensors that captures read: those of the previous version as long as no tensor was replaced."""

import pytest
import torch

from evermoe.copies.snapshot.unit_tensors import ListedTensors
from support.models import everyone, make, read, train


def places(by_unit):
    return [[(tensor.data_ptr(), tuple(tensor.shape)) for tensor in tensors] for tensors in by_unit]


def listed_units(state):
    """A list of all units of a state, and a function that lists them again and compares them with the state's."""
    units = tuple(state.held())
    listed = ListedTensors(state)

    def again():
        (found,) = listed.of([units])
        assert places(found.by_unit) == places(state.tensors(units))
        assert [place for run in found.runs for place in run] == [(t.data_ptr(), t.nbytes) for t in found.every]
        return found

    return again


def test_steps_list_no_tensor_again():
    model, optimizer, state = make("adamw")
    train(model, optimizer, 1)
    again = listed_units(state)
    first = again()
    train(model, optimizer, 2, start=1)
    state.loop.store({"consumed": 7})
    assert again() is first


def rebind_optimizer_state(model, optimizer, state):
    kept = optimizer.state[model.embedding.weight]
    kept["exp_avg"] = kept["exp_avg"].clone()


def swap_values(model, optimizer, state):
    model.embedding.weight.data = model.embedding.weight.data.clone()


def exchange_rows(model, optimizer, state):
    """Experts swap their rows in place: all addresses stay."""
    model.moe.experts.ids.reverse()


@pytest.mark.parametrize("change", [rebind_optimizer_state, swap_values, exchange_rows])
def test_replaced_tensors_and_moved_experts_are_listed_again(change):
    model, optimizer, state = make("adamw")
    train(model, optimizer, 1)
    again = listed_units(state)
    first = again()
    kept = [t.clone() for t in first.every]
    change(model, optimizer, state)
    assert again() is not first
    assert all(map(torch.equal, first.every, kept)), "a capture may still read the previous tensors"


def test_experts_that_came_back_are_listed_again():
    model, optimizer, state = make("adamw")
    train(model, optimizer, 1)
    again, data = listed_units(state), read(state)
    again()
    (path, experts), *_ = everyone(state).items()
    state.adopt({path: experts[:2]}, {})
    state.adopt({path: experts[::-1]}, {name: data[name] for name in data.keys() - set(state.held())})
    again()


def test_released_lists_keep_no_memory():
    state = make("adamw")[2]
    listed = ListedTensors(state)
    (found,) = listed.of([tuple(state.held())])
    listed.forget()
    (later,) = listed.of([tuple(state.held())])
    assert later is not found
