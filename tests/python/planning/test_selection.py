"""Selection of experts, the ledger and sharding: numpy in, numpy out, errors that name their argument."""

import json

import numpy as np
import pytest

from evermoe.planning.ledger import TokenLedger
from evermoe.planning.selection import select_experts, select_per_rank, shard_modules


def test_sequential_reads_only_the_shape():
    full = np.array([[9, 0, 0, 4], [1, 1, 1, 1]])
    for checkpoint in range(5):
        chosen = select_experts("sequential", full, checkpoint, experts_per_layer=3)
        expected = [sorted((m * 3 + checkpoint * 3 + i) % 4 for i in range(3)) for m in range(2)]
        assert chosen == expected == select_experts("sequential", full * 0, checkpoint, experts_per_layer=3)
    assert select_experts("sequential", full, experts_per_layer=99) == [[0, 1, 2, 3]] * 2


def test_capacity_is_experts_per_layer_or_what_fits_in_the_budget():
    tokens = [[5, 4, 3], [3, 2, 1]]
    by_count = select_experts("budget", tokens, experts_per_layer=1)
    assert by_count == select_experts("budget", tokens, budget_bytes=299, expert_bytes=100)
    assert sum(map(len, by_count)) == 2
    assert select_experts("budget", tokens, budget_bytes=99, expert_bytes=100) == [[], []]
    for policy in ("load-aware", "budget"):
        assert select_experts(policy, tokens, experts_per_layer=1 << 63) == [[0, 1, 2]] * 2
        assert select_experts(policy, np.zeros((2, 3), int), experts_per_layer=1) == [[], []]


def test_load_aware_takes_k_of_each_layer_however_the_tokens_and_the_ranks_are():
    rng = np.random.default_rng(3)
    assert select_per_rank([[5, 3]], 0, [[0, 0]], [[0, 1]], experts_per_layer=1) == [[0]]
    for layers, experts, ranks in ((6, 8, 8), (4, 64, 64), (3, 6, 2), (2, 6, 5)):
        rank_LE = np.tile(np.arange(experts) * ranks // experts, (layers, 1))
        ledger = TokenLedger(layers, experts, experts_per_layer=1)
        for _ in range(2 * experts):
            ledger.add(rng.zipf(1.5, (layers, experts)) % 1000 + 1)
            chosen = select_per_rank(ledger.at_risk, ledger.checkpoint, ledger.waiting, rank_LE, experts_per_layer=1)
            assert [len(row) for row in chosen] == [1] * layers
            waits = [ledger.waiting[layer, row[0]] for layer, row in enumerate(chosen)]
            count_R = np.bincount([rank_LE[layer, row[0]] for layer, row in enumerate(chosen)])
            assert max(count_R) <= -(-layers // ranks) or max(waits) >= 3 * experts
            ledger.copied(chosen)
            assert ledger.waiting.max() < 4 * experts


@pytest.mark.parametrize("order", ["C", "F"])
def test_matrices_of_any_memory_order(order):
    tokens = np.asarray([[9, 8, 0], [0, 0, 7]], order=order)
    waiting = np.asarray([[0, 0, 0], [0, 0, 6]], order=order)
    assert select_experts("budget", tokens, budget_bytes=2, expert_bytes=1) == [[0], [2]]
    assert select_experts("load-aware", tokens, waiting=waiting, experts_per_layer=1) == [[0], [2]]
    ledger = TokenLedger(2, 3)
    ledger.add(tokens)
    assert np.array_equal(ledger.at_risk, tokens)


def test_a_run_with_the_ledger():
    rng = np.random.default_rng(7)
    ledger = TokenLedger(3, 8, experts_per_layer=2, max_lost_token_fraction=0.001)
    for _ in range(30):
        ledger.add(rng.zipf(1.5, (3, 8)) % 1000)
        chosen = select_experts(
            "load-aware",
            ledger.at_risk,
            ledger.checkpoint,
            waiting=ledger.waiting,
            experts_per_layer=ledger.experts_per_layer,
        )
        ledger.copied(chosen)
        assert ledger.waiting.max() < 3 * 8 // 2
    assert (ledger.step, ledger.checkpoint) == (30, 30)
    assert np.allclose(ledger.plt_at_risk, ledger.at_risk.sum(axis=1) / ledger.seen.sum(axis=1))
    expected, at_risk = ledger.plt_at_risk.mean(), ledger.at_risk
    assert expected > 0.001
    assert ledger.lose([range(8)] * 3) == pytest.approx(expected)
    assert ledger.plt == pytest.approx(expected) == ledger.plt_lost.mean()
    assert ledger.experts_per_layer == 4
    assert np.array_equal(ledger.lost, at_risk)
    assert not ledger.at_risk.any()
    assert repr(ledger).startswith("TokenLedger(3 layers, 8 experts, step 30, checkpoint 30, K=4, PLT 0.")


def test_the_ledger_comes_back_from_json():
    ledger = TokenLedger(2, 3, experts_per_layer=1, max_lost_token_fraction=0.1)
    ledger.add([[1, 2, 3], [4, 5, (1 << 63) - 1]])
    ledger.copied([[2], [0, 1]])
    ledger.lose([[], [2]])
    again = TokenLedger.from_json(ledger.to_json())
    assert again.to_json() == ledger.to_json()
    for name in ("seen", "at_risk", "lost", "waiting"):
        assert np.array_equal(getattr(again, name), getattr(ledger, name))
    assert (again.step, again.checkpoint, again.experts_per_layer) == (1, 1, 2)
    assert json.loads(ledger.to_json())["evermoe_token_ledger"] == 1


def test_the_ledger_continues_from_the_counts_of_a_restored_state():
    ledger = TokenLedger(1, 3, experts_per_layer=1, max_lost_token_fraction=0.1)
    ledger.add([[5, 5, 5]])
    ledger.copied([[0, 1]])
    ledger.restore([[10, 10, 20]], [[0, 4, 0]], [[3, 0, 5]], 2)
    assert ledger.seen.tolist() == [[10, 10, 20]]
    assert ledger.waiting.tolist() == [[1, 0, 1]], "the first expert's latest copies are lost"
    assert ledger.portions([[10, 0, 0]]).tolist() == [0.25]
    assert (ledger.plt, ledger.experts_per_layer) == (0.1, 2)
    ledger.adapt_k()
    assert ledger.experts_per_layer == 2, "at the limit, not above it"


def test_arrays_of_the_ledger_are_copies():
    ledger = TokenLedger(1, 1)
    ledger.at_risk[0, 0] = 7
    assert ledger.at_risk[0, 0] == 0


def test_adaptive_sharding_evens_out_what_experts_weigh():
    equal = shard_modules([1 << 20, 128, 128], ranks=4)
    assert {sum(end - start for _, start, end in parts) for parts in equal[:3]} == {(1 << 18) + 64}
    adaptive = shard_modules([1 << 20], ranks=4, expert_bytes=[1 << 21, 0, 1 << 19, 0])
    sizes = [sum(end - start for _, start, end in parts) for parts in adaptive]
    assert sizes == [0, 1 << 19, 0, 1 << 19]


TOKENS = [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: select_experts("popular", TOKENS), r'policy: expected "sequential"'),
        (lambda: select_experts("budget", [1, 2], experts_per_layer=1), r"tokens: expected 2 dim"),
        (lambda: select_experts("budget", [[0.5]], experts_per_layer=1), r"tokens: expected int64, got float64"),
        (lambda: select_experts("budget", [[1, -2]], experts_per_layer=1), r"tokens: layer 0 expert 1 has -2"),
        (lambda: select_experts("budget", np.zeros((2, 0), int), experts_per_layer=1), r"got 2 layers and 0 exp"),
        (lambda: select_experts("load-aware", [[]], experts_per_layer=1), r"got 1 layers and 0 experts"),
        (lambda: select_experts("budget", TOKENS), r"experts_per_layer: expected either it, or budget"),
        (lambda: select_experts("budget", TOKENS, budget_bytes=9), r"experts_per_layer: expected either"),
        (lambda: select_experts("load-aware", TOKENS), r'experts_per_layer: "load-aware" needs it'),
        (
            lambda: select_experts("load-aware", TOKENS, experts_per_layer=1, budget_bytes=9, expert_bytes=1),
            r'experts_per_layer: "load-aware" needs it, and takes no budget_bytes',
        ),
        (lambda: select_per_rank(TOKENS, 0, TOKENS, TOKENS, experts_per_layer=0), r"experts_per_layer: expected 1"),
        (
            lambda: select_per_rank(TOKENS, 0, TOKENS, [[0, 1]], experts_per_layer=1),
            r"rank_LE: expected shape \[2, 2\]",
        ),
        (
            lambda: select_experts("budget", TOKENS, experts_per_layer=1, expert_bytes=1),
            r"experts_per_layer: expected either",
        ),
        (lambda: select_experts("budget", TOKENS, experts_per_layer=0), r"experts_per_layer: expected 1 or more"),
        (lambda: select_experts("sequential", TOKENS, experts_per_layer=0), r"experts_per_layer: expected 1"),
        (
            lambda: select_experts("sequential", TOKENS, experts_per_layer=1, budget_bytes=1),
            r'experts_per_layer: "sequential" needs it',
        ),
        (lambda: select_experts("sequential", TOKENS, -1, experts_per_layer=1), r"checkpoint: expected an integer"),
        (lambda: select_experts("budget", TOKENS, budget_bytes=-1, expert_bytes=1), r"budget_bytes: expected an"),
        (lambda: select_experts("budget", TOKENS, budget_bytes=1, expert_bytes=0), r"expert_bytes: expected 1"),
        (lambda: select_experts("budget", TOKENS, waiting=TOKENS, experts_per_layer=1), r'waiting: only "load-aware"'),
        (
            lambda: select_experts("load-aware", TOKENS, waiting=[[1, 2, 3, 4]], experts_per_layer=1),
            r"waiting: expected shape \[2, 2\] \(layers, experts\), got \[1, 4\]",
        ),
        (
            lambda: select_experts("load-aware", TOKENS, waiting=[[0, 0], [0, -1]], experts_per_layer=1),
            r"waiting: layer 1 expert 1 has -1",
        ),
        (lambda: TokenLedger(0, 2), r"layers, experts: expected 1 or more"),
        (lambda: TokenLedger(1 << 40, 1 << 40), r"more than 2\^24"),
        (lambda: TokenLedger(1, 2, experts_per_layer=0), r"experts_per_layer: expected 1 or more"),
        (
            lambda: TokenLedger(1, 2, max_lost_token_fraction=float("nan")),
            r"max_lost_token_fraction: expected a portion",
        ),
        (lambda: TokenLedger(1, 2).add([[1], [2]]), r"counts: expected shape \[1, 2\]"),
        (lambda: TokenLedger(1, 2).add([[1, -2]]), r"counts: layer 0 expert 1 has -2 tokens"),
        (lambda: TokenLedger(1, 2).copied([[2]]), r"selection: layer 0 names expert 2"),
        (lambda: TokenLedger(1, 2).copied([[-1]]), r"selection: expected an integer from 0"),
        (lambda: TokenLedger(1, 2).copied([[0]], [[1]]), r"newer: expected shape \[1, 2\]"),
        (lambda: TokenLedger(1, 2).copied([[1]], [[0, 1]]), r"newer: layer 0 expert 1 has 1; expected 0 to 0"),
        (lambda: TokenLedger(1, 2).lose([[0], [0]]), r"experts: expected one list of experts for each of 1 layers"),
        (lambda: TokenLedger(1, 2).restore([[1]], [[0]], [[0]]), r"seen: expected shape \[1, 2\]"),
        (lambda: TokenLedger(1, 1).restore([[1]], [[1]], [[1]]), r"counts: layer 0 expert 0 has seen 1 tokens"),
        (lambda: TokenLedger.from_json("{}"), r"text: expected the JSON of a token ledger: missing field"),
        (lambda: TokenLedger.from_json("[" * 10_000), r"text: expected the JSON of a token ledger"),
        (lambda: shard_modules([1], 0), r"ranks: expected 1 or more"),
        (lambda: shard_modules([1], 1 << 60), r"ranks: expected at most 2\^24"),
        (lambda: shard_modules([1], 1, alignment=0), r"alignment: expected 1 or more"),
        (lambda: shard_modules([-1], 1), r"nbytes: expected an integer"),
        (lambda: shard_modules([1], 2, [1]), r"expert_bytes: expected one number for each of 2 ranks, got 1"),
    ],
)
def test_errors_name_their_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
