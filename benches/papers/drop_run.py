"""A small training in which experts miss a part of their tokens, as in MoEtion's Table 1."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benches.papers.fault_run import EXPERTS, LAYERS, STEPS, Training, one_thread
from benches.papers.figure import Row, change

UNTOUCHED = 36
"""Steps before tokens are dropped: a tenth of all, as in the paper."""
NONE_DROPPED, STATED = 2.8861, ((3, 2.8892), (6, 3.2470), (10, 5.0146))
"""The paper's validation loss without dropped tokens, and those by percent of dropped tokens."""


def drop(part: float, generator: torch.Generator, layer: nn.Module, _: Any, y: Tensor) -> Tensor:
    """Drop a share of the tokens from the experts' output while the layer trains; a forward hook.

    Args:
        part: share of the tokens, 0 to 1.
        generator: random generator that chooses the tokens.
        layer: the layer that has computed the output.
        y: the output, `[..., H]`.
    """
    if not layer.training or not part:
        return y
    return y * (torch.rand(y.shape[:-1], generator=generator) >= part).unsqueeze(-1)


def losses(seed: int = 0) -> dict[int, float]:
    """Return the validation loss by percent of dropped tokens."""
    training = Training(seed)
    for step in range(UNTOUCHED):
        training.step(step)
    start, found = training.snapshot(), {}
    for percent in (0, *(percent for percent, _ in STATED)):
        training.restore(start)
        hook = partial(drop, percent / 100, torch.Generator().manual_seed(seed))
        handles = [layer.register_forward_hook(hook) for layer in training.layers]
        for step in range(UNTOUCHED, STEPS):
            training.step(step)
        for handle in handles:
            handle.remove()
        found[percent] = training.validate()[0]
    return found


def dropped_tokens() -> list[Row]:
    """Return the rows of validation loss by dropped tokens (MoEtion, Table 1)."""
    with one_thread():
        found = losses()
    return [
        Row(
            quantity=f"change of the validation loss by {percent} % of the tokens dropped in training",
            unit="%",
            paper=change("section 3.2; Table 1", NONE_DROPPED, loss),
            ours=100 * (found[percent] / found[0] - 1),
            how="real run",
            why=f"a GPT of {LAYERS} layers with {EXPERTS} experts, {STEPS} steps on the text of Python's standard "
            f"library, the first {UNTOUCHED} without drops; {found[0]:.4f} nats a byte without any. A dropped token "
            "passes by the residual connection, and is counted in the loss",
        )
        for percent, loss in STATED
    ]
