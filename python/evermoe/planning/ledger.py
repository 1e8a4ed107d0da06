"""Tokens at risk, tokens lost, and the K that follows from them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from evermoe import _native
from evermoe.planning._arguments import array, count, count_lists


class TokenLedger:
    """Counts the tokens of every expert since it was last copied; L layers, E experts.

    `add` the counts of each step. Report what a checkpoint has `copied` and, after a recovery, which experts
    fell back to their last copy: `lose`. The portion of lost tokens (PLT, of PEC / MoC-System) is counted per
    layer, tokens lost over tokens seen, and averaged over layers.

    Dynamic-K: a run may lose `max_lost_token_fraction` of its tokens, and each part of it the same portion of its own.
    So whenever a recovery that lost tokens leaves the PLT of the run so far above the limit, `experts_per_layer`
    doubles, up to E.

    A ledger belongs to one kind of copy; snapshots and persisted ones have one each. Save `to_json()` with the
    checkpoint: training that goes back to the checkpoint goes back to that ledger, and then calls `lose`.

        >>> from evermoe.planning.selection import select_experts
        >>> ledger = TokenLedger(1, 4, experts_per_layer=1, max_lost_token_fraction=0.05)
        >>> ledger.add([[60, 30, 10, 0]])
        >>> chosen = select_experts("load-aware", ledger.at_risk, ledger.checkpoint, waiting=ledger.waiting,
        ...                         experts_per_layer=ledger.experts_per_layer)
        >>> ledger.copied(chosen)
        >>> ledger.at_risk, ledger.waiting
        (array([[ 0, 30, 10,  0]]), array([[0, 1, 1, 0]]))
        >>> ledger.lose([[2, 3]])  # 10 of 100 tokens, more than 0.05
        0.1
        >>> ledger.experts_per_layer
        2

    Args:
        layers: number of MoE layers L.
        experts: experts of each layer E.
        experts_per_layer: where K starts; more than E is E. None for all.
        max_lost_token_fraction: portion of its tokens that the run may lose, 0 to 1; at 1 K stays where it is.

    Raises:
        ValueError: a size is 0, there are more than 2^24 experts in all, or the limit is no portion.
    """

    def __init__(
        self, layers: int, experts: int, *, experts_per_layer: int | None = None, max_lost_token_fraction: float = 1.0
    ) -> None:
        if not isinstance(max_lost_token_fraction, int | float):
            raise ValueError(
                f"max_lost_token_fraction: expected a portion from 0 to 1, got {max_lost_token_fraction!r}"
            )
        each = experts if experts_per_layer is None else experts_per_layer
        self.native = _native.TokenLedger(
            count("layers", layers),
            count("experts", experts),
            count("experts_per_layer", each),
            max_lost_token_fraction,
        )

    def add(self, counts: ArrayLike) -> None:
        """Count the tokens [L, E] of a step, all ranks together.

        Raises:
            ValueError: a wrong shape, a negative count, or a sum beyond 2^63; the ledger is then as before.
        """
        self.native.add(array("counts", counts, np.int64, 2))

    def copied(self, selection: Sequence[Sequence[int]], newer: ArrayLike | None = None) -> None:
        """Note a checkpoint that copied these experts of each layer as they are now; also an empty one.

        Args:
            selection: of each layer.
            newer: [L, E] the newest tokens of these experts, where their copies lack some: they stay at risk.

        Raises:
            ValueError: not one list for each layer, an expert that does not exist, a wrong shape, or more tokens of an
                expert of the selection than are at risk; the ledger is then as before.
        """
        lacking = None if newer is None else array("newer", newer, np.int64, 2)
        self.native.copied(count_lists("selection", selection), lacking)

    def lose(self, experts: Sequence[Sequence[int]]) -> float:
        """Note a recovery in which these experts of each layer fell back to their last copies; returns its PLT.

        None of what they have is at risk from then on.

        Raises:
            ValueError: not one list for each layer, or an expert that does not exist; the ledger is then as before.
        """
        return self.native.lose(count_lists("experts", experts))

    def restore(self, seen: ArrayLike, lost: ArrayLike, at_risk: ArrayLike, experts_per_layer: int = 0) -> None:
        """Replace the counts by those of a restored state, and raise K to `experts_per_layer`.

        An expert with more tokens at risk than before has been passed over once more: its latest copies are lost.

        Args:
            seen: [L, E] tokens since the start.
            lost: [L, E] tokens lost in recoveries.
            at_risk: [L, E] tokens since the last copy.
            experts_per_layer: least K.

        Raises:
            ValueError: a wrong shape, a negative count, or more tokens at risk and lost than seen; the ledger is then
                as before.
        """
        self.native.restore(
            array("seen", seen, np.int64, 2),
            array("lost", lost, np.int64, 2),
            array("at_risk", at_risk, np.int64, 2),
            count("experts_per_layer", experts_per_layer),
        )

    def adapt_k(self) -> None:
        """Double K if the PLT of the run is above the limit (Dynamic-K); call it after a recovery that lost tokens."""
        self.native.adapt_k()

    def portions(self, part: ArrayLike) -> NDArray[np.float64]:
        """Return for each layer [L] its tokens in `part` [L, E], divided by all tokens seen."""
        return self.native.portions(array("part", part, np.int64, 2))

    @property
    def step(self) -> int:
        """Steps added so far."""
        return self.native.step

    @property
    def checkpoint(self) -> int:
        """Checkpoints so far: the number of the next one."""
        return self.native.checkpoint

    @property
    def experts_per_layer(self) -> int:
        """K, as Dynamic-K has it now."""
        return self.native.experts_per_layer

    @property
    def seen(self) -> NDArray[np.int64]:
        """[L, E] tokens since the start."""
        return self.native.seen

    @property
    def at_risk(self) -> NDArray[np.int64]:
        """[L, E] tokens since the last copy."""
        return self.native.at_risk

    @property
    def lost(self) -> NDArray[np.int64]:
        """[L, E] tokens lost in recoveries."""
        return self.native.lost

    @property
    def waiting(self) -> NDArray[np.int64]:
        """[L, E] checkpoints that passed an expert over while it had tokens at risk."""
        return self.native.waiting

    @property
    def plt_at_risk(self) -> NDArray[np.float64]:
        """[L] PLT of a failure now that takes all experts back to their last copies."""
        return self.native.plt_at_risk

    @property
    def plt_lost(self) -> NDArray[np.float64]:
        """[L] PLT of the run so far: all tokens lost over all tokens seen."""
        return self.native.plt_lost

    @property
    def plt(self) -> float:
        """PLT of the run so far, averaged over layers."""
        return self.native.plt

    def to_json(self) -> str:
        """Return the ledger as JSON, from which `from_json` restores it exactly."""
        return self.native.to_json()

    @classmethod
    def from_json(cls, text: str) -> TokenLedger:
        """Return the ledger that `to_json` wrote.

        Raises:
            ValueError: the text is no ledger, or its numbers contradict each other.
        """
        ledger = cls.__new__(cls)
        ledger.native = _native.TokenLedger.from_json(text)
        return ledger

    def __repr__(self) -> str:
        layers, experts = self.at_risk.shape
        return (
            f"TokenLedger({layers} layers, {experts} experts, step {self.step}, checkpoint {self.checkpoint}, "
            f"K={self.experts_per_layer}, PLT {self.plt:.3g} lost, {self.plt_at_risk.mean():.3g} at risk)"
        )
