"""Tokens that an expert gets in a step, as an exponential moving average."""

from __future__ import annotations

from numbers import Real

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evermoe import _native
from evermoe.planning._arguments import array, count


class LoadAverage:
    """Exponential moving average of the tokens of every expert; L layers, E experts.

    A step counts half of one `half_life` steps later. The average is right from the first step on: the weights of the
    steps seen are divided by their sum, as Adam corrects its moments (Kingma & Ba 2015, Algorithm 1). A step in which a
    layer has no tokens is no step of that layer. Ranks that have the same state and add the same counts have the same
    bits.

        >>> average = LoadAverage(1, 2, half_life=1)
        >>> average.add([[8, 0]])
        >>> average.add([[2, 6]])
        >>> average.loads  # (8 / 2 + 2) / (1 / 2 + 1) and 6 / (1 / 2 + 1)
        array([[4., 4.]])
        >>> average.state  # discounted tokens, and the discounted number of steps
        array([[6. , 6. , 1.5]])

    Args:
        layers: number of MoE layers L.
        experts: experts of each layer E; pad the counts of layers that have fewer with zeros.
        half_life: in steps, 1 or more.
        state: float64 [L, E + 1], from `state` of another average; None to start from zero.

    Raises:
        ValueError: the half-life is below 1 or not finite, or the state is none of this shape.
    """

    def __init__(self, layers: int, experts: int, *, half_life: float, state: ArrayLike | None = None) -> None:
        if not isinstance(half_life, Real):
            raise ValueError(f"half_life: expected a number of steps, got {half_life!r}")
        given = None if state is None else array("state", state, np.float64, 2)
        sizes = count("layers", layers), count("experts", experts)
        self._average: _native.LoadAverage = _native.LoadAverage(*sizes, float(half_life), given)

    def add(self, tokens: ArrayLike) -> None:
        """Count the tokens [L, E] of a step, all ranks together.

        Raises:
            ValueError: a wrong shape, or a negative count; the average is then as before.
        """
        self._average.add(array("tokens", tokens, np.int64, 2))

    @property
    def loads(self) -> NDArray[np.float64]:
        """[L, E] average tokens in a step; zeros for a layer that has had none."""
        return self._average.loads

    @property
    def state(self) -> NDArray[np.float64]:
        """[L, E + 1] what another rank, or a checkpoint, needs: discounted tokens, then discounted steps."""
        return self._average.state

    def __repr__(self) -> str:
        layers, experts = self.loads.shape
        return f"LoadAverage({layers} layers, {experts} experts)"
