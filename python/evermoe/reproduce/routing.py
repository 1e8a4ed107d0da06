"""Synthetic routing in place of the papers' traces, which our copies do not have. L layers, E experts.

The same seed gives the same tokens everywhere: nothing but NumPy's PCG64 and elementary functions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def skewed_load(layers: int, experts: int, sigma: float, seed: int = 0) -> NDArray[np.float64]:
    """Shares [L, E] of a layer's tokens: log-normal, each layer with hot experts of its own.

    Args:
        layers: L.
        experts: E.
        sigma: of the logarithm: 0 is even; at 3, 2 of 16 experts get up to 84 % of the tokens with seed 0.
        seed: of the draw.
    """
    raw_LE = np.exp(sigma * np.random.default_rng(seed).standard_normal((layers, experts)))
    return raw_LE / raw_LE.sum(1, keepdims=True)


def drifting_tokens(
    steps: int, layers: int, experts: int, sigma: float, *, tokens: int = 1 << 15, memory: int = 200, seed: int = 0
) -> NDArray[np.int64]:
    """Tokens [steps, L, E] of a skewed load whose hot experts change gradually: log-shares as an AR(1) process.

    Args:
        steps: how many.
        layers: L.
        experts: E.
        sigma: of the logarithm, at every step.
        tokens: of a layer in a step, about, as shares are rounded.
        memory: steps after which the logarithms' correlation has fallen to 1 / e.
        seed: of the draw.
    """
    generator = np.random.default_rng(seed)
    keep = np.exp(-1 / memory)
    logs_LE = generator.standard_normal((layers, experts))
    found = np.empty((steps, layers, experts), np.int64)
    for step in range(steps):
        raw_LE = np.exp(sigma * logs_LE)
        found[step] = np.rint(tokens * raw_LE / raw_LE.sum(1, keepdims=True))
        logs_LE = keep * logs_LE + np.sqrt(1 - keep**2) * generator.standard_normal((layers, experts))
    return found
