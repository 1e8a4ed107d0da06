"""The typed face of the balanced split and of the imbalance."""

import numpy as np
import pytest

from evermoe import planning
from evermoe.planning.dispatch import imbalance


def drawn(experts, ranks, slots, seed):
    rng = np.random.default_rng(seed)
    tokens_EN = rng.integers(0, 100, (experts, ranks)) * rng.integers(1, 20, (experts, 1))
    replicas_E = planning.allocate(tokens_EN.sum(axis=1), ranks, slots, min_replicas=1)
    return tokens_EN, planning.place(replicas_E, ranks, slots).matrix


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(("experts", "ranks", "slots"), [(256, 32, 9), (64, 16, 6), (8, 4, 3)])
def test_balanced_is_one_table_that_meets_its_imbalance(experts, ranks, slots, order):
    tokens_EN, matrix_NE = (np.asarray(part, order=order) for part in drawn(experts, ranks, slots, seed=experts))
    parts = [planning.split_tokens(tokens_EN, matrix_NE, rank, policy="balanced") for rank in range(ranks)]
    computed_N = np.zeros(ranks)
    for rank, (send_EN, receive_NE) in enumerate(parts):
        assert send_EN.dtype == receive_NE.dtype == np.int64
        assert np.array_equal(send_EN.sum(axis=1), tokens_EN[:, rank])
        assert not receive_NE[:, matrix_NE[rank] == 0].any()
        for other in range(ranks):
            assert np.array_equal(receive_NE[other], parts[other][0][:, rank])
        computed_N[rank] = receive_NE.sum()
    load_E = tokens_EN.sum(axis=1)
    fluid = imbalance(matrix_NE, load_E, policy="balanced") * computed_N.mean()
    assert fluid - 1e-6 <= computed_N.max() < fluid + 1
    assert fluid - 1e-6 <= imbalance(matrix_NE, load_E) * computed_N.mean()


def test_even_is_the_default():
    tokens_EN, matrix_NE = drawn(8, 4, 3, seed=1)
    default = planning.split_tokens(tokens_EN, matrix_NE, 2)
    even = planning.split_tokens(tokens_EN, matrix_NE, 2, "even")
    assert all(np.array_equal(left, right) for left, right in zip(default, even, strict=True))
    load_E = tokens_EN.sum(axis=1)
    assert imbalance(matrix_NE, load_E) == imbalance(matrix_NE, load_E, "even")


def test_imbalance_takes_integers_and_no_load():
    assert imbalance([[1], [0]], np.array([7])) == 2.0
    assert imbalance([[0, 0]] * 3, [0, 0]) == 1.0
    assert imbalance(np.zeros((3, 0), np.int64), [], policy="balanced") == 1.0


@pytest.mark.parametrize("ranks", [3, 1 << 40])
def test_no_experts_send_nothing(ranks):
    none_EN = np.zeros((0, ranks), np.int64)
    send, receive = planning.split_tokens(none_EN, none_EN.T, 1, "balanced")
    assert (send.shape, receive.shape) == ((0, ranks), (ranks, 0))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: planning.split_tokens([[1, 0]], [[1], [1]], 0, "fair"),
            r"policy: expected one of even, balanced, got 'fair'",
        ),
        (
            lambda: planning.split_tokens([[1, 0]], [[0], [0]], 0, "balanced"),
            r"matrix: expert 0 has 1 tokens and no replica",
        ),
        (lambda: planning.split_tokens([[1, -3]], [[1], [1]], 0, "balanced"), r"tokens: expert 0 has -3 tokens"),
        (lambda: planning.split_tokens([[2**60] * 2] * 2, [[1, 1]] * 2, 0, "balanced"), r"tokens: .* more than 2\^61"),
        (lambda: imbalance([[1, 1]], [1.0]), r"load: expected 2 numbers as matrix is \[1, 2\]"),
        (lambda: imbalance([[1, 1]], [1.0, float("nan")]), r"load: expert 1 has load NaN"),
        (lambda: imbalance([[1, 1]], [1.0, -2.0]), r"load: expert 1 has load -2"),
        (lambda: imbalance([[1, 1]], [1e308, 1e308]), r"load: the sum overflows"),
        (lambda: imbalance([[1, 0]], [1.0, 2.0]), r"matrix: expert 1 has load and no replica"),
        (lambda: imbalance([[1, -1]], [1.0, 2.0]), r"matrix: expert 1 has -1 replicas on node 0"),
        (lambda: imbalance(np.zeros((0, 2), np.int64), [1.0, 2.0]), r"matrix: expected 1 node or more"),
        (lambda: imbalance([[1, 1]], [1.0, 2.0], "fair"), r"policy: expected"),
    ],
)
def test_errors_name_their_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
