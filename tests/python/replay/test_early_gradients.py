"""Gradients for replicas that are sent while backward computes others: whatever a script does, replicas are right."""

import pytest
import torch
from torch import nn

from evermoe import MoE
from evermoe._native import RECORD_HEADER_BYTES
from evermoe.comm import arrivals
from evermoe.comm.courier import Courier
from evermoe.copies.replay.calibrate import calibrate
from evermoe.copies.replay.exchange import ReplayExchange
from evermoe.copies.replay.sender import GradientSender
from evermoe.copies.replay.source import GradientRecord
from evermoe.planning.protection import UnitProtection
from evermoe.state.stored import KeptCopies
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit
from support.harness import PATIENCE
from support.ranks import connected, run_each, trained_and_kept

STEPS, LAYERS, SIZE = 8, 3, 3
HEALED = 4
"""The step with which one rank's full states come again."""
KINDS = ["plain", "twice", "more", "fewer", "clipped", "replaced", "removed", "unused", "left out", "late"]
KINDS += ["rate", "weights", "state", "swapped", "patient", "reduced", "other memory"]


def compute(weights, optimizer, rank, step, kind, gradients):
    """Backpropagates as a script may, and changes what it likes afterwards."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    for _ in range({"twice": 2, "more": 1 + step // 3, "fewer": 3 - step // 3}.get(kind, 1)):
        gradients.begin_backward()
        used = weights[: LAYERS - (step + rank) % 2] if kind == "unused" else weights
        sum((each * torch.randn(each.shape, generator=generator)).sum() for each in used).backward()
    if kind != "swapped":  # what was sent is as it was then
        assert all(task.wait() for task in gradients.tasks)
    if kind == "rate" and step % 3:
        optimizer.param_groups[0]["lr"] *= 0.9
    if kind == "weights" and step % 3 and rank:
        weights[step % LAYERS].data.clamp_(-0.1, 0.1)
        with torch.no_grad():
            weights[step % LAYERS] *= 1.1
    if kind == "state" and step % 3 == 0:
        optimizer.state[weights[rank]]["exp_avg"].zero_()
    if kind == "other memory":
        weights[2].grad.data = weights[2].grad.data / 2
    if kind == "swapped":
        gradient, weights[1].grad = weights[1].grad, None
        (weights[1] * 2).sum().backward()
        weights[1].grad = gradient
    if kind in ("clipped", "patient") and step % 2:
        nn.utils.clip_grad_value_(weights[rank:], 0.1)
    if kind == "replaced" and step % 3:
        weights[1].grad = weights[1].grad * 2
    if kind == "removed" and step % 3 == 0:
        weights[2].grad = None


def train(group, kind, bucket_bytes, rest):
    """Return what each rank trained, what it keeps of others, and per step the buckets that it sent early.

    `rest`: the rank that has a unit which is not known to be complete after backward.
    """
    arrivals.PATIENT_STEPS = STEPS if kind == "patient" else 1
    torch.manual_seed(0)
    rank, model = group.rank, nn.Sequential(*(MoE(8, 8, 6, top_k=1) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    state = TrainingState(model, optimizer)
    state.adopt({path: [2 * rank, 2 * rank + 1] for path in state.layers}, {})
    places = [(path, expert) for expert in range(6) for path in state.layers]  # not the catalog's order
    kept = [
        UnitProtection(
            expert_unit(path, e), "replayed", e // 2, tuple((e // 2 + i) % SIZE for i in range(1, 2 + e % 2))
        )
        for path, e in places
    ]
    alone = {each.unit for each in kept if each.primary != rest or each.unit != kept[2 * LAYERS * rest].unit}
    courier = Courier(connected(group, PATIENCE), None, "courier")
    copies = ReplayExchange(
        state,
        kept,
        rank,
        {optimizer: calibrate(optimizer)},
        alone=alone,
        bucket_bytes=bucket_bytes,
        keeps_previous=True,
    )
    begun = courier.submit(lambda: copies.begin_with(courier, 0, KeptCopies()))
    assert begun.wait(), begun.lost
    weights, early = [layer.weights for layer in state.layers.values()], []
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        selected = {each.unit for number, each in enumerate(kept) if kind != "left out" or (number + step) % 3}
        selected = None if step == STEPS else selected
        if step == HEALED and rank == 1:
            copies.sender.request_full_state()
        copies.gradients.begin_step(courier, step, selected, may_send=kind != "late" or step % 2 == 0)
        compute(weights, optimizer, rank, step, kind, copies.gradients)
        early.append(copies.gradients._next)
        copies.gradients.end_backward()
        if kind == "reduced" and rank == rest:
            path, expert = places[2 * LAYERS * rest]
            state.layers[path].weights.grad[state.layers[path].ids.index(expert)] *= 2
        task = courier.submit(lambda step=step, selected=selected: copies.exchange_step(courier, step, selected))
        assert task.wait(), task.lost
        assert not task.result.needs_full_state
        optimizer.step()
        copies.commit_step(1.0)
    return trained_and_kept(group, state, copies, courier, STEPS) | {"early": early}


@pytest.mark.parametrize("rest", [1, pytest.param(-1, marks=pytest.mark.long)], ids=["one has a rest", "no rest"])
@pytest.mark.parametrize("kinds", [KINDS[::2], KINDS[1::2]], ids=["half", "the others"])
def test_replicas_have_what_was_trained(tmp_path, kinds, rest):
    found = run_each(tmp_path, SIZE, train, [*((kind, 1, rest) for kind in kinds), ("plain", 0, -1)])
    for kind, results in zip([*kinds, None], found, strict=True):
        if kind is None:  # without buckets all is sent after backward
            assert [result.pop("early") for result in results] == [[0] * STEPS] * SIZE
            check_bytes(results)
        else:
            check(results, kind, rest)


def check_bytes(results):
    mine = {unit: data for result in results for unit, data in result["mine"].items()}
    assert len(mine) == 6 * LAYERS
    for result in results:
        assert len(result["theirs"]) == 3 * LAYERS  # both experts of the rank before, one of the other
        assert all(torch.equal(data, mine[unit]) for unit, data in result["theirs"].items())


def check(results, kind, rest):
    check_bytes(results)
    for rank, result in enumerate(results):
        assert result["early"][0] == 0, "how often a script backpropagates is not known yet"
        most = LAYERS if rank == rest else LAYERS - 1
        if kind == "patient":
            assert result["early"][1:] == [most, most] + [0] * (STEPS - 3), "changed in the third step, first"
        elif kind not in ("more", "fewer", "late", "unused"):
            assert result["early"][1:] == [most] * (STEPS - 1)


def test_a_gradient_that_cannot_be_encoded_takes_its_record_back():
    weight = nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    arithmetics = {optimizer: calibrate(optimizer)}
    sender = GradientSender(optimizer, {"u": {"weight": weight}}, arithmetics=arithmetics, is_hooked=False)
    sender.follow_unit("u")
    weight.grad = torch.ones(4, 4)
    [record] = sender.next_step_records(1, "u")
    assert isinstance(record, GradientRecord)
    weight.grad = weight.grad.to_sparse()
    sender.reread()
    [state] = sender.next_step_records(1, "u")
    assert len(state) == RECORD_HEADER_BYTES + weight.nbytes, "the full previous state, which ends what is held"
    sender.on_step()
    sender.reread()
    assert sender.lacking("u"), "and the state after it comes next"
