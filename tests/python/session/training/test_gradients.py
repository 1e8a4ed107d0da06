"""Whether gradients are finite: in any type, place and size; refusals by the vote on them."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from evermoe import MoE
from evermoe.comm import vote
from evermoe.comm.group import Group
from evermoe.errors import NonFiniteLoss
from evermoe.session.gradients import (
    NORM_ELEMENTS,
    SquareSum,
    extremes,
    faults,
    norms,
    read,
    refuse_mixed,
    refuse_nonfinite,
)
from evermoe.state.training_state import TrainingState
from support.ranks import run_threads


def are_finite(gradients):
    return all(math.isfinite(each) for (each,) in read(*extremes(gradients)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_is_found_wherever_it_is(dtype, value):
    largest = torch.finfo(dtype).max
    gradients = [torch.full((17, 33), largest, dtype=dtype), torch.zeros((), dtype=dtype), torch.empty(0, dtype=dtype)]
    assert are_finite(gradients), "the largest numbers are fine"
    for place in (0, 300, 560):
        gradients[0].view(-1)[place] = value
        assert not are_finite(gradients)
        gradients[0].view(-1)[place] = -largest
    assert are_finite([])


def squares(state, rank):
    found = SquareSum(state, rank, 2)
    return found.value(*read(found.norms))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_squares_are_those_of_all_gradients_once(device, dtype):
    """Two ranks: expert 0 is on both, 1 and 2 on one of them each, and the dense gradients are the same everywhere."""
    layer = MoE(8, 8, 3, top_k=1, device=device, dtype=dtype)
    state = TrainingState(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    matrix = np.array([[1, 1, 0], [1, 0, 1]])
    width, random = layer.experts.weights.shape[1], torch.Generator().manual_seed(0)
    everything = torch.randn(3, width, generator=random).to(device, dtype)
    dense = torch.full_like(layer.router.weight, 3)
    total = 0.0
    for rank, row in enumerate(matrix):
        experts = np.flatnonzero(row).tolist()
        layer.experts.ids, layer.experts.matrix_RE = experts, matrix
        layer.experts.weights = nn.Parameter(layer.experts.weights.detach()[: len(experts)].clone())
        assert squares(state, rank) == 0.0, "no gradients yet"
        layer.experts.weights.grad, layer.router.weight.grad = everything[experts], dense
        total += squares(state, rank)
        layer.router.weight.grad = None
        layer.experts.weights = nn.Parameter(torch.zeros(3, width, device=device, dtype=dtype))
    expected = everything.double().square().sum() + dense.double().square().sum()
    assert total == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_norms_of_all_sizes_are_those_in_float64(device, dtype):
    random = torch.Generator().manual_seed(0)
    shapes = [(), (0,), (1,), (NORM_ELEMENTS - 1,), (NORM_ELEMENTS,), (3, NORM_ELEMENTS + 1), (70, 1000)]
    gradients = [torch.randn(shape, generator=random).to(device, dtype) for shape in shapes]
    gradients.append(gradients[-1].t())
    found = norms(gradients)
    assert found.dtype == torch.float64
    expected = [float(each.double().norm()) for each in gradients]
    assert found.tolist() == pytest.approx(expected, rel=1e-12 if dtype == torch.float64 else 1e-6)
    assert norms([]).tolist() == []
    stacks = [
        torch.randn(rows, row, generator=random).to(device, dtype) for rows, row in ((0, 5000), (3, 4097), (2, 9))
    ]
    assert torch.equal(norms(gradients, stacks), norms([*gradients, *(row for stack in stacks for row in stack)]))


@pytest.mark.parametrize("largest", [1e18, 1e25, 3e38])
def test_norms_whose_squares_no_float32_holds(device, largest):
    gradient = torch.full((2 * NORM_ELEMENTS + 1,), largest, device=device)
    assert norms([gradient]).item() == pytest.approx(float(gradient.double().norm()), rel=1e-6)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_element_shows_in_the_norm(device, bad):
    for place in (0, NORM_ELEMENTS - 1, NORM_ELEMENTS, 2 * NORM_ELEMENTS + 7):
        gradient = torch.ones(2 * NORM_ELEMENTS + 8, device=device)
        gradient[place] = bad
        assert not math.isfinite(norms([gradient, torch.ones(3, device=device)])[0])


def test_squares_that_no_float_holds_are_infinite():
    layer = MoE(8, 8, 2, top_k=1, dtype=torch.float64)
    state = TrainingState(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    layer.experts.weights.grad = torch.full_like(layer.experts.weights, 9.6e152)
    found = SquareSum(state, 0, 1)
    assert all(norm * norm < math.inf for norm in found.norms.tolist()), "each alone is finite"
    assert found.value(*read(found.norms)) == math.inf


def test_numbers_are_read_together(device):
    numbers = torch.tensor(3, dtype=torch.int64, device=device), torch.tensor([0.5, 2.0]), torch.zeros(0, device=device)
    assert read(*numbers, torch.tensor(True, device=device)) == [[3.0], [0.5, 2.0], [], [1.0]]


def vote_on(group, ballots):
    """Return the reason why a step is refused; empty if it is not."""
    sums, _ = vote.cast(group, vote.Ballot(1.0, **ballots[group.rank]))
    try:
        refuse_nonfinite(sums, 5, "abc")
        refuse_mixed(sums)
    except (NonFiniteLoss, ValueError) as error:
        return str(error).partition(". ")[0]
    return ""


NAN = "step 5: the loss or a gradient is infinite or not a number, from "


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({}, ""),
        ({1: "loss"}, f"{NAN}rank 1 on b"),
        ({2: "gradient"}, f"{NAN}rank 2 on c"),
        ({0: "gradient", 2: "loss"}, f"{NAN}rank 2 on c"),
        ({0: "loss", 1: "loss"}, f"{NAN}2 members"),
        ({0: "gradient", 1: "gradient", 2: "gradient"}, f"{NAN}3 members"),
    ],
)
def test_a_step_that_is_not_finite_is_refused_with_its_rank_where_it_is_one(tmp_path, bad, message):
    ballots = [
        {"loss": 0.5} | faults(math.nan if bad.get(rank) == "loss" else 0.5, rank not in bad, rank) for rank in range(3)
    ]
    assert run_threads(tmp_path, 3, vote_on, ballots) == [message] * 3


def test_counts_of_some_members_are_refused(tmp_path):
    ballots = [{"trainers": 1.0, "counting": float(rank > 0), "counted": 4.0 * rank} for rank in range(3)]
    for said in run_threads(tmp_path, 3, vote_on, ballots):
        assert said.startswith("2 of 3 members gave count, the others did not: the loss is a sum with a count on all")
    assert run_threads(tmp_path, 3, vote_on, ballots[1:2] * 3) == [""] * 3
    assert vote_on(Group(), [{"squares": math.inf}]).endswith("in the sums over the members")
