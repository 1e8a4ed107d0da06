"""Sizes of copies, from which the evidence takes the papers' reductions."""

import pytest

from benches.papers.sizes import ModelSize, checkpoint_bytes

MODEL = ModelSize(non_expert_parameters=1000, layers=2, experts=4, expert_parameters=500)


def test_sizes():
    full = checkpoint_bytes(MODEL, "full")
    assert full == checkpoint_bytes(MODEL, "pec", experts_per_layer=9) == checkpoint_bytes(MODEL, "moetion", selected=8)
    assert full.expert_bytes == 8 * 500 * 14
    assert full.non_expert_bytes == 1000 * 14
    assert checkpoint_bytes(MODEL, "moetion", selected=0).total_bytes == full.non_expert_bytes
    gradients = checkpoint_bytes(MODEL, "gradients")
    assert gradients.total_bytes == 2 * (1000 + 8 * 500)
    assert gradients.ratio == pytest.approx(2 / 14)
    assert checkpoint_bytes(MODEL, "gradients", selected=0).expert_bytes == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: checkpoint_bytes(MODEL, "half"), r'policy: expected "full"'),
        (lambda: checkpoint_bytes(MODEL, "pec"), r'experts_per_layer: "pec" needs it'),
        (lambda: checkpoint_bytes(MODEL, "full", experts_per_layer=1), r"experts_per_layer: .* no other policy"),
        (lambda: checkpoint_bytes(MODEL, "moetion"), r'selected: "moetion" needs'),
        (lambda: checkpoint_bytes(MODEL, "pec", experts_per_layer=1, selected=1), r'selected: only "moetion"'),
        (lambda: checkpoint_bytes(MODEL, "moetion", selected=9), r"selected: expected at most 8"),
        (
            lambda: ModelSize(non_expert_parameters=-1, layers=1, experts=1, expert_parameters=1),
            r"non_expert_parameters: expected an integer",
        ),
        (
            lambda: ModelSize(non_expert_parameters=0, layers=0, experts=1, expert_parameters=1),
            r"non_expert_parameters: the model has no bytes",
        ),
    ],
)
def test_errors_name_their_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
