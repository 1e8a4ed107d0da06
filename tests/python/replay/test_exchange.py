"""Copies that repeat steps, between two processes: their bits, however the messages are cut."""

import numpy as np
import pytest
import torch

from evermoe import MoE
from evermoe._native import digest
from evermoe.comm.courier import Courier
from evermoe.copies.replay import exchange
from evermoe.copies.replay.calibrate import calibrate
from evermoe.copies.replay.frame import Frame
from evermoe.errors import PeerLost
from evermoe.planning.protection import UnitProtection
from evermoe.state.stored import KeptCopies
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit
from support.harness import PATIENCE
from support.ranks import connected, run_each, run_ranks, trained_and_kept

STEPS = 12
HEALED = 5
"""The step with which full states come again, together with the gradients."""


def train(group, first_bytes, device="cpu", keeps_previous=False):
    """Return what each rank trained, and what it keeps of the other one: unit → bytes after the last step."""
    exchange.HEAD_BYTES = first_bytes
    torch.manual_seed(0)
    layer = MoE(8, 8, 6, top_k=1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    state = TrainingState(layer, optimizer)
    experts = {0: [0, 1, 2], 1: [3, 4, 5]}
    path = next(iter(state.layers))
    state.adopt({path: experts[group.rank]}, {})
    kept = [
        UnitProtection(expert_unit(path, expert), "replayed", rank, (1 - rank,))
        for rank in experts
        for expert in experts[rank]
    ]
    courier = Courier(connected(group, PATIENCE), None, "courier")
    copies = exchange.ReplayExchange(
        state, kept, group.rank, {optimizer: calibrate(optimizer)}, device=device, keeps_previous=keeps_previous
    )
    sent = [begin(courier, copies)]
    unread = {"begun": sorted(copies.stored(needed=()))}
    for step in range(1, STEPS + 1):
        layer.experts.weights.grad = torch.randn_like(layer.experts.weights)
        if step == HEALED:
            copies.sender.request_full_state()
        sent.append(send(courier, copies, step))
        optimizer.step()
        copies.commit_step(1.0)
    unread["trained"] = sorted(copies.stored(needed=()))
    surveys = [sorted(copies.stored()) for _ in range(2)]
    assert all(digest(copies.read(unit, step).numpy()) == value for unit, step, value in surveys[1])
    found = trained_and_kept(group, state, copies, courier, STEPS)
    return found | {"sent": sent, "surveys": surveys, "unread": unread}


def train_some(group, skipped, are_early):
    """Like `train`, but only some units are sent in each step, by an optimizer that counts up no versions.

    `are_early`: states that are sent again come as the step begins, in pieces, and not with its gradients.
    """
    torch.manual_seed(0)
    layer = MoE(8, 8, 6, top_k=1)
    optimizer = torch.optim.SGD(layer.parameters(), lr=1e-2, momentum=0.9, fused=True)
    state = TrainingState(layer, optimizer)
    experts = {0: [0, 1, 2], 1: [3, 4, 5]}
    path = next(iter(state.layers))
    state.adopt({path: experts[group.rank]}, {})
    kept = [UnitProtection(expert_unit(path, e), "replayed", r, (1 - r,)) for r, each in experts.items() for e in each]
    courier = Courier(connected(group, PATIENCE), None, "courier")
    copies = exchange.ReplayExchange(state, kept, group.rank, {optimizer: calibrate(optimizer)}, message_bytes=500)
    begin(courier, copies)
    sent = []
    for step in range(1, STEPS + 1):
        layer.experts.weights.grad = torch.randn_like(layer.experts.weights)
        if step == skipped:
            layer.experts.weights.grad[0, 3] = float("nan")
        selected = {each.unit for number, each in enumerate(kept) if (number + step) % 3 or step == STEPS}
        if are_early:
            versions = {unit: copies.replica.version(unit) for unit in copies.units}
            before = courier.sent_bytes
            task = courier.submit(
                lambda step=step, selected=selected: copies.early.exchange_states(courier, step, selected)
            )
            assert task.wait(), task.lost
            sent.append(courier.sent_bytes - before)
            assert {unit: copies.replica.version(unit) for unit in copies.units} == versions, "nothing counts as yet"
        send(courier, copies, step, selected=selected)
        if step != skipped:
            optimizer.step()
        copies.commit_step(None if step == skipped else 1.0)
    return trained_and_kept(group, state, copies, courier, STEPS) | {"sent": sent}


def test_units_that_were_left_out_of_a_step_follow_again(tmp_path):
    """With gradients that are sent after backward, or early."""
    cases = [(skipped, are_early) for skipped in (None, 4, STEPS) for are_early in (False, True)]
    for (_, are_early), results in zip(cases, run_each(tmp_path, 2, train_some, cases), strict=True):
        for rank in range(2):
            if are_early:
                assert max(results[rank]["sent"]) > 1000, "a state, of several pieces"
            theirs, trained = results[rank]["theirs"], results[1 - rank]["mine"]
            assert theirs.keys() == trained.keys()
            assert all(torch.equal(theirs[unit], trained[unit]) for unit in trained)


def begin(courier, copies, kept=None):
    """Bytes that were sent for replicas to begin with the state before the first step."""
    return complete(courier, lambda: copies.begin_with(courier, 0, kept or KeptCopies()))


def send(courier, copies, step, **options):
    """Bytes that were sent in a step."""
    return complete(courier, lambda: copies.exchange_step(courier, step, **options))


def complete(courier, work):
    """Bytes that were sent; nothing may be damaged."""
    task = courier.submit(work)
    assert task.wait(), task.lost
    assert not task.result.needs_full_state
    return task.result.sent_bytes


def test_copies_equal_what_the_other_trained_however_the_messages_are_cut(tmp_path, device):
    """None of a step's gradients fits into the first message, or some, or all."""
    for results in run_each(tmp_path, 2, train, [(first_bytes, device) for first_bytes in (0, 2000, 1 << 20)]):
        for rank in range(2):
            theirs, trained = results[rank]["theirs"], results[1 - rank]["mine"]
            assert len(trained) == 3
            assert theirs.keys() == trained.keys()
            assert all(torch.equal(theirs[unit], trained[unit]) for unit in trained)
            sent = results[rank]["sent"]
            assert sent[HEALED] > 3 * sent[HEALED - 1]
            assert sent[0] > 2 * max(sent[1:HEALED])


def test_copies_are_reported_at_the_steps_that_they_can_reach_and_found_again_by_the_next_recovery(tmp_path):
    """Also copies that nobody needs."""
    cases = [(1 << 20, "cpu", keeps_previous) for keeps_previous in (False, True)]
    for (*_, keeps_previous), results in zip(cases, run_each(tmp_path, 2, train, cases), strict=True):
        steps = {STEPS - 1, STEPS} if keeps_previous else {STEPS}
        for result in results:
            begun, trained = result["unread"]["begun"], result["unread"]["trained"]
            assert [(step, value) for _, step, value in begun] == [(0, None)] * 3, "there is no step before"
            first, second = result["surveys"]
            assert first == second
            for reported in (trained, first):
                assert {step for _, step, _ in reported} == steps
                assert len(reported) == 3 * len(steps)


def test_damaged_sizes_of_messages_are_a_lost_peer_and_no_wait():
    messages = [np.full(size, size, np.uint8) for size in (3, 40, 60)]
    sent, came = Frame(4, 50), Frame(4, 50)
    head, tail = sent.write_records(messages)
    came.data[: len(head)] = head
    for bit in range(8 * (8 + 4 * 8)):
        came.data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PeerLost, match="sizes of member 5"):
            came.check_sizes(5)
        came.data[bit // 8] ^= 1 << bit % 8
    came.check_sizes(5)
    assert came.tail_bytes() == len(tail) == 60
    found = [each for data, sizes in came.split_records(tail) for each in data.split(sizes)]
    assert [each.tolist() for each in found] == [each.tolist() for each in messages]


def begin_everywhere(group):
    """Digests of what each rank keeps of rank 0's experts, each of which two ranks keep; first what rank 0 trains."""
    torch.manual_seed(group.rank)
    layer = MoE(8, 8, 12, top_k=1)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    state = TrainingState(layer, optimizer)
    path = next(iter(state.layers))
    state.adopt({path: list(range(12)) if group.rank == 0 else []}, {})
    kept = [UnitProtection(expert_unit(path, expert), "replayed", 0, (1, 2)) for expert in range(12)]
    courier = Courier(connected(group, PATIENCE), None, "courier")
    copies = exchange.ReplayExchange(state, kept, group.rank, {optimizer: calibrate(optimizer)})
    begin(courier, copies)
    found = {unit: value for unit, _, value in copies.stored()}
    if group.rank == 0:
        names = [each.unit for each in kept]
        found = dict(zip(names, state.digests(names), strict=True))
    group.all_reduce(torch.zeros(1))
    copies.close()
    courier.close()
    return found


def test_records_for_several_peers_are_made_in_memory_that_is_used_again(tmp_path):
    trained, *copies = run_ranks(tmp_path, 3, begin_everywhere)
    assert len(trained) == 12 == len(set(trained.values()))
    assert copies == [trained, trained]
