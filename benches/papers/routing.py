"""Synthetic routing instead of the papers' traces, which our copies lack. L layers, E experts.

A seed gives the same tokens on every machine, as it uses only NumPy's PCG64 and elementary functions.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def skewed_load(layers: int, experts: int, sigma: float, seed: int = 0) -> NDArray[np.float64]:
    """Return shares [L, E] of a layer's tokens: log-normal, each layer with its own hot experts.

    Args:
        layers: L.
        experts: E.
        sigma: deviation of the logarithm: 0 is even; at 3, 2 of 16 experts get up to 84 % of the tokens (seed 0).
        seed: seed of the draw.
    """
    raw_LE = np.exp(sigma * np.random.default_rng(seed).standard_normal((layers, experts)))
    return raw_LE / raw_LE.sum(1, keepdims=True)


def drifting_tokens(
    steps: int, layers: int, experts: int, sigma: float, *, tokens: int = 1 << 15, memory: int = 200, seed: int = 0
) -> NDArray[np.int64]:
    """Return tokens [steps, L, E] of a skewed load whose hot experts change gradually: log-shares as an AR(1) process.

    Args:
        steps: number of steps.
        layers: L.
        experts: E.
        sigma: standard deviation of the logarithm, at every step.
        tokens: approximate tokens of a layer in a step, as shares are rounded.
        memory: steps after which the logarithms' correlation has fallen to 1 / e.
        seed: seed of the draw.
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
