"""The typed face of the planners: numpy in, numpy out, every error a ValueError that names its argument."""

import numpy as np
import pytest

from evermoe import planning
from evermoe.planning.dispatch import imbalance
from evermoe.planning.holders import copy_holders, primaries, unit_copy_holders
from evermoe.planning.ledger import TokenLedger
from evermoe.planning.placement import POLICIES, FewerReplicas
from evermoe.planning.recovery import recovery_plan
from evermoe.planning.selection import shard_modules
from evermoe.planning.survival import copy_recovery_probability


def test_allocate_takes_lists_and_integers():
    replicas = planning.allocate(np.array([10, 20, 40, 10]), 4, 2, 1)
    assert replicas.dtype == np.int64
    assert replicas.tolist() == [1, 2, 4, 1]


def test_placement_keeps_experts_where_they_are():
    replicas = planning.allocate([5, 1, 1, 1], nodes=3, slots=3, min_replicas=2)
    before = planning.place(replicas, 3, 3).matrix
    assert before.shape == (3, 4)
    assert before.sum(axis=1).tolist() == [3, 3, 3]
    for policy in POLICIES:
        before = planning.place(replicas, 3, 3, policy).matrix
        assert np.array_equal(planning.place(replicas, 3, 3, policy, previous=before).matrix, before), policy


def test_placement_gives_its_reason():
    load = [8.0, 4.0, 2.0, 2.0]
    replicas = planning.allocate(load, 4, 2)
    reason = planning.place(replicas, 4, 2, load=load, domains=[[0, 1], [2, 3]]).reason
    assert (reason.failures, reason.spread, reason.survival, reason.moved) == (2, 2, 0.0, None)
    assert str(reason).startswith(reason.construction)
    assert "every expert on 2 failure domains or more" in str(reason)


def test_fewer_replicas_than_wanted_are_reported():
    with pytest.warns(FewerReplicas, match="3 experts × 2 do not fit in 2 nodes × 2 slots = 4; every"):
        assert planning.allocate([1.0, 1.0, 1.0], 2, 2).tolist() == [1, 1, 2]


@pytest.mark.parametrize("order", ["C", "F"])
def test_split_tokens_conserves_in_any_memory_order(order):
    rng = np.random.default_rng(1)
    tokens_EN = np.asarray(rng.integers(0, 100, (6, 4)), order=order)
    matrix_NE = np.asarray(planning.place(planning.allocate(tokens_EN.sum(axis=1), 4, 3), 4, 3).matrix, order=order)
    parts = [planning.split_tokens(tokens_EN, matrix_NE, rank) for rank in range(4)]
    for rank, (send_EN, receive_NE) in enumerate(parts):
        assert send_EN.dtype == receive_NE.dtype == np.int64
        assert np.array_equal(send_EN.sum(axis=1), tokens_EN[:, rank])
        for other in range(4):
            assert np.array_equal(receive_NE[other], parts[other][0][:, rank])
        assert not receive_NE[:, matrix_NE[rank] == 0].any()


def test_split_tokens_takes_a_torch_tensor():
    torch = pytest.importorskip("torch")
    send, _ = planning.split_tokens(torch.tensor([[4, 0]], dtype=torch.int32), torch.tensor([[1], [1]]), 0)
    assert send.tolist() == [[2, 2]]


def test_recovery_plan_is_readable_and_read_only():
    holdings = [[("w", 4, 1, "active")], [("w", 4, 2, "active")], [("w", 4, 2, "snapshot")]]
    plan = recovery_plan([("w", 64)], holdings, [["w"], [], ["w"]])
    assert plan.version == 4
    assert plan.lost == []
    assert plan.transfers == [("w", 1, 0, "active"), ("w", 2, 2, "snapshot")]
    assert plan.conflicts == [("w", 0, 1, 2)]
    assert plan.reason == "the newest version is complete"
    assert repr(plan).startswith("RecoveryPlan(version=4, 0 lost, 2 transfers, 1 conflicts")
    with pytest.raises(AttributeError):
        plan.version = 5  # type: ignore[misc]


def test_recovery_plan_takes_all_64_bits():
    version, digest = (3 << 40) | 17, (1 << 64) - 1
    plan = recovery_plan([("w", 1)], [[("w", version, digest, "active")], []], [[], ["w"]])
    assert plan.version == version


def test_recovery_plan_with_a_unit_that_lags():
    holdings = [[("w", 9, 1, "active")], [("x", 6, 2, "replayed"), ("x", 7, 3, "persisted")]]
    plan = recovery_plan([("w", 8), ("x", 4)], holdings, [["w", "x"], ["x"]], may_lag=["x"])
    assert (plan.version, plan.stale) == (9, [("x", 7)])
    assert plan.transfers == [("x", 1, 0, "persisted"), ("x", 1, 1, "persisted")]
    assert plan.reason == "the newest complete version; of the units that may lag, 1 are older"
    assert recovery_plan([("w", 8), ("x", 4)], holdings, [[], []]).version is None


def test_lost_units_have_names():
    plan = recovery_plan([("w", 1), ("x", 1)], [[("w", 4, 1, "active")]], [["w"]])
    assert (plan.version, plan.lost, plan.transfers) == (None, ["x"], [])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: planning.allocate([1.0] * 9, 2, 4),
            r"slots: 9 experts do not fit in 2 nodes × 4 slots = 8; use",
        ),
        (lambda: planning.allocate([1.0, -1.0], 2, 4), r"load: expert 1 has load -1"),
        (lambda: planning.allocate([[1.0]], 2, 4), r"load: expected 1 dimensions, got shape \[1, 1\]"),
        (lambda: planning.allocate([1.0], -2, 4), r"nodes: expected an integer from 0"),
        (lambda: planning.allocate([1.0], 2.5, 4), r"nodes: expected an integer from 0 to 2\^64 - 1, got 2.5"),
        (lambda: planning.allocate([1.0], None, 4), r"nodes: expected an integer from 0 to 2\^64 - 1, got None"),
        (lambda: planning.allocate([[1.0], 1.0], 2, 4), r"load: expected an array of 1 dimensions; "),
        (lambda: planning.place(np.array([2**63, 1], np.uint64), 2, 2), r"replicas: expected numbers below 2\^63"),
        (lambda: planning.allocate([1.0], 2, 4, 0), r"min_replicas: expected 1 or more"),
        (lambda: planning.place([1.5, 2.5], 2, 2), r"replicas: expected int64, got float64"),
        (lambda: planning.place([1, 2], 2, 2), r"replicas: they sum to 3; expected 2 nodes × 2 slots = 4"),
        (lambda: planning.place([2, 2], 2, 2, previous=[[1, 1, 0]] * 2), r"previous: expected shape \[2, 2\]"),
        (lambda: planning.place([2, 2], 2, 2, previous=[[1, 1]] * 3), r"previous: expected shape \[2, 2\]"),
        (lambda: planning.place([2, 2], 0, 2), r"nodes, slots: expected 1 or more"),
        (lambda: planning.place([2, 2], 2, 2, "best"), r"policy: expected one of balanced, safest, mro"),
        (lambda: planning.place([2, 2], 2, 2, load=[1.0, np.nan]), r"load: expert 1 has load NaN"),
        (lambda: planning.place([2, 2], 2, 2, load=[1.0]), r"load: expected one number for each of 2 experts, got 1"),
        (lambda: planning.place([2, 2], 2, 2, failures=3), r"failures: expected 1 to 2, the number of nodes, got 3"),
        (lambda: planning.place([2, 2], 2, 2, domains=[[0, 1], [1]]), r"domains: "),
        (lambda: planning.place([2, 2], 2, 2, domains=[[0, 2]]), r"domains: "),
        (lambda: planning.place([2, 2], 2, 2, domains=[[-1]]), r"domains: expected an integer from 0"),
        (lambda: planning.split_tokens([[1, 0]], [[1, 1]], 0), r"matrix: expected shape \[2, 1\]"),
        (
            lambda: planning.split_tokens([[1, 0]], [[0], [0]], 0),
            r"matrix: expert 0 has 1 tokens and no replica",
        ),
        (
            lambda: planning.split_tokens([[1, -3]], [[1], [1]], 0),
            r"tokens: expert 0 has -3 tokens on rank 1",
        ),
        (
            lambda: planning.split_tokens([[1, 3]], [[1], [-1]], 0),
            r"matrix: expert 0 has -1 replicas on rank 1",
        ),
        (lambda: planning.split_tokens([[1, 3]], [[1], [1]], 2), r"rank: expected 0 to 1"),
        (lambda: planning.split_tokens([[1.0, 3.0]], [[1], [1]], 0), r"tokens: expected int64, got float64"),
        (
            lambda: planning.place([2, 2], 2, 2, 3),
            r"policy: expected one of balanced, safest, .*, got 3",
        ),
        (lambda: planning.place([2, 2], 2, 2, domains=5), r"domains: expected a list of lists of integers, got 5"),
        (lambda: planning.place([2, 2], 2, 2, domains=[0, 1]), r"domains: expected a list of integers, got 0"),
        (lambda: planning.place([2, 2], 2, 2, previous=[[-1, 1], [1, 1]]), r"previous: node 0 has a negative number"),
        (lambda: planning.place(np.ones(2**17, int), 2**17, 1), r"nodes: 131072 nodes × 131072 experts are more than"),
        (lambda: imbalance([[1]], [1.0], None), r"policy: expected one of even, balanced, got None"),
        (lambda: primaries([], [], 2**40), r"ranks: expected at most 2\^24"),
        (lambda: copy_holders("ab", 2), r"nodes: expected a list of names, got 'ab'"),
        (lambda: copy_holders([1, 2], 1), r"nodes: expected names, which are strings, got 1"),
        (
            lambda: copy_holders(["a"], 1, policy=None),
            r"policy: expected one of mixed, group, ring, previous, got None",
        ),
        (lambda: unit_copy_holders([-1], [[0]], ["a"], 1), r"primaries: expected an integer from 0"),
        (
            lambda: unit_copy_holders([9], [[0]], ["a"], 1),
            r"primaries: unit 0 names rank 9; there are",
        ),
        (lambda: copy_recovery_probability([0, 1], 1), r"holders: expected a list of integers, got 0"),
        (lambda: shard_modules(None, 1), r"nbytes: expected a list of integers, got None"),
        (
            lambda: TokenLedger(1, 1, max_lost_token_fraction="x"),
            r"max_lost_token_fraction: expected a portion from 0 to 1, got 'x'",
        ),
        (lambda: copy_holders(["a"], 0), r"copies: expected 1"),
        (lambda: primaries([[]], [1], 1), r"holders: unit 0 has none"),
        (lambda: primaries([[0]], [-1], 1), r"nbytes: expected an integer"),
        (lambda: recovery_plan([("w", 1)] * 2, [], []), r"units: a name occurs twice"),
        (
            lambda: recovery_plan([], [[("w", 1, 1, "active")]], [[]]),
            r"holdings: rank 0 names \"w\"",
        ),
        (lambda: recovery_plan([], [[]], [["w"]]), r"needs: rank 0 names \"w\""),
        (
            lambda: recovery_plan([("w", 1)], [[("w", 1, 1, "disk")]], [[]]),
            r"holdings: expected kind \"active\", \"replayed\", \"snapshot\", \"persisted\", got \"disk\"",
        ),
        (
            lambda: recovery_plan([("w", 1)], [[]], [[]], may_lag=["x"]),
            r"may_lag: it names \"x\", which is not one of units",
        ),
        (lambda: recovery_plan([("w", 1)], [[]], [[]], may_lag="w"), r"may_lag: expected a list of names"),
        (lambda: recovery_plan([("w", 1)], [[]], []), r"needs: expected one list for each"),
    ],
)
def test_errors_name_their_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
