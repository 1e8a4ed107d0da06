"""The papers' rows against oracles of their own: enumeration, closed forms, loops without evermoe's planners."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from benches.papers import (
    baft,
    drop_run,
    fault_run,
    gemini,
    gemini_times,
    lazarus,
    lazarus_placement,
    moetion,
    moetion_placement,
    moetion_times,
    pec,
)
from benches.papers.registry import FIGURES
from benches.papers.routing import drifting_tokens, skewed_load
from evermoe.planning.ledger import TokenLedger


def ours(figure, start):
    """The number of the one row whose quantity starts so."""
    (found,) = [row.ours for row in FIGURES[figure].rows() if row.quantity.startswith(start)]
    return found


# ---- gemini


@pytest.mark.parametrize(("machines", "lost"), [(16, 1), (16, 2), (16, 3), (8, 4)])
def test_pairs_survive_what_leaves_one_of_each(machines, lost):
    losses = list(itertools.combinations(range(machines), lost))
    fatal = sum(any({2 * at, 2 * at + 1} <= set(loss) for at in range(machines // 2)) for loss in losses)
    assert gemini.survival(machines, 2, lost) == pytest.approx(100 * (1 - fatal / len(losses)))


def test_the_count_of_the_first_case_is_right_up_to_two_groups_and_then_a_lower_bound():
    for machines, copies in ((12, 2), (12, 3)):
        for lost in range(copies, 2 * copies):
            assert gemini.counted_once(machines, copies, lost) == pytest.approx(gemini.survival(machines, copies, lost))
        assert gemini.counted_once(machines, copies, 2 * copies) < gemini.survival(machines, copies, 2 * copies)


def test_groups_are_the_best_placement():
    """Each machine is in a pair that holds its copies, so that there are N / 2 pairs at least: a covering by edges."""
    assert [gemini._fewest_fatal(machines) for machines in (2, 3, 4, 5)] == [1, 2, 2, 3]
    assert ours("gemini-theorem1", "pairs whose loss is fatal") == 3


def test_times_of_gemini_follow_from_bytes_and_bandwidths():
    assert ours("gemini-eq1", "checkpoint of MT-NLG") == pytest.approx(530e9 * 12 * 8 / 20e9 / 60)
    remote, peer = 100e9 * 12 * 8 / 20e9, 100e9 * 12 / 128 / (400e9 / 8 / 8)
    assert peer < remote / ours("gemini-f11", "time of a checkpoint") < 1.01 * peer
    assert ours("gemini-f7", "idle time") == pytest.approx(100 * peer / gemini_times.STEP, rel=0.01)


def test_copies_in_one_buffer_wait_for_it_to_be_emptied():
    """A chunk is sent and emptied in turn, so that windows carry half, and what is left takes twice its time."""
    step = 40e9 * 12 / 16 / (100e9 / 8) / 0.101
    idle = 0.1687
    late = 2 * (0.101 - idle / 2)
    assert 100 * late == pytest.approx(ours("gemini-f16", "the same, copies that travel in one"), rel=0.06)
    assert ours("gemini-f16", "a step of GPT-2 40B") == pytest.approx(10.1, rel=0.01)
    assert step == pytest.approx(23.8, abs=0.1)


# ---- pec


@pytest.mark.parametrize(("each", "interval"), [(1, 1), (1, 32), (2, 32), (4, 16), (8, 8)])
def test_in_turn_an_expert_waits_for_the_others(each, interval):
    assert pec.lost_steps(each, interval) == pytest.approx((8 / each - 1) / 2 * interval)


def test_sizes_of_gpt2_moe_are_those_of_gpt2_and_its_experts():
    hidden, words = 768, 50_257
    gpt2 = words * hidden + 1024 * hidden + 12 * (12 * hidden**2 + 13 * hidden) + 2 * hidden
    assert gpt2 == 124_439_808  # of GPT-2's model card
    experts = 7 * 6 * (8 * hidden**2 + 5 * hidden)
    assert ours("pec-f5a", "parameters of GPT2") == pytest.approx((gpt2 + experts + 6 * 8 * hidden) / 1e6)
    for head, total in (("that is the embedding", gpt2), ("of its own", gpt2 + words * hidden)):
        assert ours("pec-f5a", f"parameters of the MoE model over those of GPT2-Small, output matrix {head}") == (
            pytest.approx((total + experts) / total, rel=1e-3)
        )
        assert ours("pec-f5a", f"reduction of a checkpoint without duplicates, K = 1, output matrix {head}") == (
            pytest.approx(100 * experts / (total + experts), rel=1e-3)
        )


def test_no_rank_saves_less_than_its_even_share():
    dense = pec.STATE_BYTES * sum(pec.dense_modules(is_tied=True))
    expert = pec.STATE_BYTES * pec.EXPERT
    share = (dense + pec.LAYERS * expert) / pec.RANKS
    assert share <= pec.busiest(1, is_tied=True, is_adaptive=True) < share + 64
    equal = pec.busiest(1, is_tied=True, is_adaptive=False)
    assert equal == pytest.approx(dense / pec.RANKS + expert, rel=1e-5)
    assert ours("pec-f5b", "time of a checkpoint, adaptive below equal sharding, K = 1, evermoe") == pytest.approx(
        100 * (1 - share / equal), rel=1e-3
    )


def dealt(modules, loads):
    """Bytes of the busiest rank where undivided modules, the largest first, go to the rank with the fewest."""
    loads = list(loads)
    for module in sorted(modules, reverse=True):
        loads[int(np.argmin(loads))] += module
    return max(loads)


@pytest.mark.parametrize(("is_tied", "head"), pec.HEADS)
def test_whole_modules_leave_the_busiest_rank_with_the_embedding(is_tied, head):
    modules, expert = pec.dense_modules(is_tied=is_tied), pec.EXPERT
    base = sum(modules) + 6 * expert
    assert dealt(modules, [expert] * 6 + [0, 0]) == max(modules) == 50_257 * 768
    start = "reduction of what a rank saves, K = 1, adaptive sharding of complete modules"
    assert ours("pec-f5b", f"{start}, {head}") == pytest.approx(100 * (1 - max(modules) / base))
    fixed = dealt(modules, [0] * 8) + expert  # an expert's turn comes to every rank, also to the embedding's
    start = "time of a checkpoint, adaptive below equal sharding, K = 1, complete modules"
    assert ours("pec-f5b", start) == pytest.approx(100 * (1 - max(modules) / fixed))


def test_algorithm_1_as_printed_keeps_to_every_ranks_capacity():
    ledger = TokenLedger(6, 8, experts_per_layer=1)
    ledger.add(drifting_tokens(1, 6, 8, sigma=2.0)[0])
    chosen = pec.as_printed(1)(ledger)
    assert [len(row) for row in chosen] == [1] * 6
    assert len({expert for row in chosen for expert in row}) == 6  # each rank has one expert of all layers
    assert chosen[-1] == [int(ledger.at_risk[-1].argmax())]


def test_dynamic_k_holds_the_limit_where_a_fixed_k_does_not():
    dynamic, fixed = (row.ours for row in FIGURES["pec-f5d"].rows())
    assert dynamic <= 5 < fixed == pytest.approx(100 * 3.5 / 50)


# ---- lazarus


def survived(matrices, lost):
    together = np.hstack(matrices) > 0
    losses = list(itertools.combinations(range(len(together)), lost))
    kept = [np.delete(together, loss, 0).any(0).all() for loss in losses]
    return 100 * sum(kept) / len(losses)


@pytest.mark.parametrize("policy", ["mro", "spread", "compact", "safest", "balanced"])
def test_recovery_of_gpt_l_is_counted_over_all_losses(policy):
    matrices = lazarus.placements(skewed_load(12, 16, lazarus.EARLY), 10, policy)
    assert lazarus.survival(matrices, 4) == pytest.approx(survived(matrices, 4))
    assert ours(
        "lazarus-f8", f"recovery of GPT-L at step 200, 4 of 10 nodes lost, placement {policy}"
    ) == pytest.approx(survived(matrices, 4))


def test_theorem_1_is_beaten_by_dealing_out():
    rows = FIGURES["lazarus-theorem1"].rows()
    assert all(row.paper is None for row in rows)  # the theorem states no number
    assert rows[0].ours == pytest.approx(100 * 2 / 3)
    dealt = [{0, 1}, {0, 2}, {1, 2}]
    assert all(set.union(*(dealt[:at] + dealt[at + 1 :])) == {0, 1, 2} for at in range(3))
    assert [row.ours for row in rows[1:]] == [100, 100, 100]


def test_what_moves_is_no_less_than_what_no_survivor_has():
    """One node lost: rows can be given to survivors in every order; the fewest replicas move."""
    load_LE = skewed_load(lazarus.LAYERS, 8, lazarus.LATE)[:1]
    before, after = lazarus.placements(load_LE, 10, "mro")[0], lazarus.placements(load_LE, 9, "mro")[0]
    fewest = []
    for lost in range(10):
        alive = np.delete(before, lost, 0) > 0
        if alive.any(0).all():
            fewest.append(assigned(((after > 0)[:, None, :] & ~alive[None, :, :]).sum(2)))
    assert lazarus_placement._moved(load_LE, 1) == pytest.approx(np.mean(fewest))


def assigned(cost_RN):
    """Least sum with each row in a column of its own, by sets of columns."""
    best = {0: 0}
    for row in cost_RN:
        step: dict[int, int] = {}
        for used, total in best.items():
            for column, cost in enumerate(row):
                if not used >> column & 1:
                    key = used | 1 << column
                    step[key] = min(step.get(key, 1 << 30), total + int(cost))
        best = step
    return min(best.values())


# ---- baft


def test_bubbles_are_what_a_pipeline_of_that_depth_has():
    layout = baft.Layout(2, 2, 4, 128, 8)
    slots = np.zeros((4, 4 - 1 + 8), bool)  # one forward each: stage s works from s on for 8 micro-batches
    for stage in range(4):
        slots[stage, stage : stage + 8] = True
    assert layout.bubbles == pytest.approx(1 - slots.mean())
    assert {layout.data * layout.tensor * layout.pipeline for layout in baft.LAYOUTS} == {16}


@pytest.mark.parametrize("model", [baft.BERT_LARGE, baft.GPT_2], ids=lambda model: model.name)
def test_a_checkpoint_takes_the_steps_that_its_bytes_need(model):
    nbytes = model.parameters * 4 / 4
    for layout in baft.LAYOUTS:
        share = max(layout.bubbles, 0.2)
        needed = math.ceil(nbytes / (share * model.step * 10e9 / 8))
        assert needed <= baft.plan(model, share, "auto").steps_per_version <= needed + 1


def test_complete_layers_fill_a_bubble_like_a_knapsack():
    sizes, capacity = [5, 9, 14, 3], 20
    reach = {0}
    for size in sizes:
        reach |= {total + size for total in reach if total + size <= capacity}
    assert baft.complete_layers(sizes, capacity) == max(reach) == 19
    assert baft.complete_layers([21], 20) == 0


# ---- moetion


def test_sizes_follow_from_the_dense_and_the_sparse_model():
    size = moetion_times.from_totals(1.6e9, 58.7e9, 64)
    assert size.non_expert_parameters + size.expert_parameters == pytest.approx(1.6e9)
    assert size.non_expert_parameters + 64 * size.expert_parameters == pytest.approx(58.7e9)
    expert = (58.7 - 1.6) / 63
    assert ours("moetion-f4", "its checkpoint with 6") == pytest.approx(10 * (1.6 - expert + 6 * expert))


@pytest.mark.parametrize(("data", "stages", "copies", "short"), [(2, 3, 3, 2), (1, 4, 1, 4), (4, 2, 2, 0)])
def test_algorithm_2_as_printed_leaves_workers_short(data, stages, copies, short):
    lists = moetion_placement.as_printed(data, stages, copies)
    assert sum(len(held) < copies for held in lists) == short
    assert all(worker not in held and len(set(held)) == len(held) for worker, held in enumerate(lists))
    if data > 1:  # what it calls the data-parallel group is worker i's pipeline
        assert all(held[0] % data == worker % data for worker, held in enumerate(lists))


def test_tokens_at_risk_are_those_since_an_experts_last_turn():
    tokens = drifting_tokens(40, 2, 8, sigma=1.5)
    unsaved, total = np.zeros((2, 8), np.int64), []
    for step, now in enumerate(tokens):
        unsaved += now
        for layer in range(2):
            unsaved[layer, [(layer * 2 + step * 2 + at) % 8 for at in range(2)]] = 0
        total.append(unsaved.sum() / now.sum())
    assert moetion.at_risk("sequential", tokens, 2) == pytest.approx(np.array(total))
    assert moetion.at_risk("budget", tokens, 2).mean() < np.mean(total)


def test_wider_checkpoints_have_all_that_is_no_experts():
    """6 of 64 experts: 10 bytes of D + 6 F, of which D is no expert's."""
    expert = (58.7 - 1.6) / 63
    dense = 1.6 - expert
    assert ours("moetion-redundancy", "part of a checkpoint that is no expert's, without ZeRO, MoE-GPT-1.6B") == (
        pytest.approx(100 * dense / (dense + 6 * expert))
    )
    assert ours("moetion-f10", "time of a selective checkpoint, MoE-GPT-1.6B") == pytest.approx(
        10 * (dense + 6 * expert) / 16 / 40
    )


# ---- the real run, in small


def test_experts_fall_back_to_what_was_saved_of_them(monkeypatch):
    monkeypatch.setattr(fault_run, "STEPS", 6)
    training = fault_run.Training(0)
    every, turns = (
        fault_run.Saved(fault_run.Way("sequential", 8, 1)),
        fault_run.Saved(fault_run.Way("sequential", 1, 1)),
    )
    history = []
    for step in range(1, 6):
        tokens_LE = training.step(step - 1)
        for saved in (every, turns):
            saved.after(step, tokens_LE, training)
        history.append([tensor.clone() for tensor in training.expert_state()[0]])
    at_fault = training.snapshot()
    every.fall_back(training)
    assert every.ledger.plt == 0
    for now, then in zip(training.expert_state()[0], history[-1], strict=True):
        assert now.equal(then)
    turns.fall_back(training)
    saved_at = [max([1, *(step for step in range(2, 6) if (step - 1) % 8 == expert)]) for expert in range(8)]
    for part, now in enumerate(training.expert_state()[0]):
        for expert, step in enumerate(saved_at):
            assert now[expert].equal(history[step - 1][part][expert]), (part, expert)
    assert 0 < turns.ledger.plt < 1
    training.restore(at_fault)
    assert all(now.equal(then) for now, then in zip(training.expert_state()[0], history[-1], strict=True))


def test_a_dropped_token_gets_nothing_from_the_experts_and_only_in_training():
    layer, y = torch.nn.Identity(), torch.ones(50, 40, 3)
    draw = torch.Generator().manual_seed(0)
    kept = drop_run.drop(0.1, draw, layer, None, y)
    assert kept.unique().tolist() == [0, 1]
    assert (kept == kept[..., :1]).all()  # all of a token
    assert float(kept.mean()) == pytest.approx(0.9, abs=0.02)
    assert drop_run.drop(0.0, draw, layer, None, y) is y
    assert drop_run.drop(0.1, draw, layer.eval(), None, y) is y


def test_loads_are_skewed_as_they_say():
    shares = np.sort(skewed_load(12, 16, 3.0), 1)
    assert shares[:, -2:].sum(1).max() == pytest.approx(0.84, abs=0.01)
    tokens = drifting_tokens(50, 3, 8, 1.0)
    assert tokens.sum(2).min() > (1 << 15) - 8 and np.array_equal(tokens, drifting_tokens(50, 3, 8, 1.0))
