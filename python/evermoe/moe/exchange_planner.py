"""Plans a layer's exchanges of tokens: with exact sizes, padded, or for a rank that has all experts.

Shape suffixes: R ranks, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from evermoe.comm import step_exchanges
from evermoe.moe import checkpointing, graph_ops, lost_exchange
from evermoe.moe.expert import Expert
from evermoe.moe.token_exchange import MAX_RANKS, Exchange, HostMemory, Padding, Placed, refuse_capture
from evermoe.planning import split_tokens
from evermoe.planning.dispatch import SplitPolicy


class PlannedLayer(lost_exchange.Layer, Protocol):
    """A layer whose exchanges are planned."""

    expert: Expert
    training: bool


class ExchangePlanner:
    """Plans the exchanges of one layer; all ranks plan the same way.

    Args:
        num_experts: E.
        given_split: policy by which replicas share the tokens of their expert; None: that of the session's preset.
        max_tokens: maximum number of tokens of any rank in one forward; None: exchanges are not padded.
    """

    def __init__(self, num_experts: int, given_split: SplitPolicy | None, max_tokens: int | None) -> None:
        self.max_tokens, self._given_split = max_tokens, given_split
        self.split: SplitPolicy = given_split or "balanced"
        self.matrix_RE = np.ones((1, num_experts), np.int64)
        """Replicas of each expert on each rank."""
        self._padding: tuple[np.ndarray, torch.device, int, Padding] | None = None
        self._placed: tuple[np.ndarray, torch.device, Placed] | None = None
        self._host = HostMemory()

    def copy_without_job(self) -> ExchangePlanner:
        """Return the planner of a copy of the layer, which is on one rank."""
        found = ExchangePlanner(self.matrix_RE.shape[1], self._given_split, self.max_tokens)
        found.split = self.split
        return found

    def split_as(self, default: SplitPolicy) -> None:
        """Split tokens by the given policy, or by `default` if none was given."""
        self.split = self._given_split or default

    def begin(
        self, layer: PlannedLayer, choices: tuple[int, int], counts_E: Tensor, dtype: torch.dtype
    ) -> Callable[[], Exchange]:
        """Begin to plan the exchange of a forward, and return a function that does the rest. Collective.

        Args:
            layer: of the forward.
            choices: number of tokens, and K.
            counts_E: int64, this rank's tokens of each expert.
            dtype: in which tokens are sent.
        """
        (tokens, top_k), widths = choices, (layer.expert.hidden, layer.expert.intermediate)
        is_quick = graph_ops.takes_groups(counts_E.device, dtype, widths)
        if layer.group.is_alone and (counts_E.is_cuda or (is_quick and self.max_tokens is not None)):
            alone = Exchange.alone(_gather(layer, counts_E), tokens * top_k, None if is_quick else self._host)
            return lambda: alone
        if is_quick and self.max_tokens is not None:
            padding = self._find_padding(layer, self.max_tokens, top_k, counts_E.device)
            if padding.fits(layer.expert.hidden * dtype.itemsize):
                padded = Exchange.padded(_gather(layer, counts_E), padding, layer.group.rank)
                return lambda: padded
        return self.begin_exact(layer, counts_E)

    def begin_exact(self, layer: PlannedLayer, counts_E: Tensor) -> Callable[[], Exchange]:
        """Begin to plan an exchange with exact sizes, and return a function that does the rest. Collective.

        This is the only additional exchange of a forward, and its only wait for a GPU, since the host must know how
        many rows it sends and receives. With `even` the GPU splits the tokens, and the host reads only the sizes. With
        `balanced` the host plans from the counts of all ranks. That algorithm (`src/dispatch/flow.rs`) finds one
        augmenting path after the other, each depending on the previous ones, so it does not parallelise on a GPU.
        """
        return lost_exchange.plan_or_lose(layer, counts_E, self._begin_exact(layer, counts_E))

    def _begin_exact(self, layer: PlannedLayer, counts_E: Tensor) -> Callable[[], Exchange]:
        layer.count.begun += layer.group.broken is None
        tokens_RE = step_exchanges.all_gather(counts_E, layer.group)
        refuse_capture()
        if self.split == "even" and tokens_RE.is_cuda and layer.group.size <= MAX_RANKS:
            exchange = self._plan_on_device(layer, tokens_RE)
            return lambda: exchange
        read = self._host.begin_read(tokens_RE)

        def plan() -> Exchange:
            on_host_RE = read()
            layer.group.check_nccl()  # after a failure the GPU is released without the counts
            tokens_E = on_host_RE.sum(0)
            layer.count.add(tokens_E, is_counted=_is_counted(layer))
            if self._keeps_tokens(on_host_RE):
                own_E = on_host_RE[layer.group.rank]
                planned = own_E[:, None], own_E[None]
            else:
                tokens_ER = np.ascontiguousarray(on_host_RE.T)
                planned = split_tokens(tokens_ER, self.matrix_RE, layer.group.rank, self.split)
            return Exchange.of(tokens_RE.device, tokens_E, *planned, layer.ids)

        return plan

    def _keeps_tokens(self, tokens_RE: NDArray[np.int64]) -> bool:
        """Return whether no exchange could balance the ranks better: all have all experts, and as many tokens."""
        tokens_R = tokens_RE.sum(1)
        is_even = tokens_R.max() * len(tokens_R) < tokens_R.sum() + len(tokens_R)
        return self.split == "balanced" and bool(is_even) and bool(self.matrix_RE.all())

    def _plan_on_device(self, layer: PlannedLayer, tokens_RE: Tensor) -> Exchange:
        """Let the GPU plan the exchange, from the tokens of all ranks."""
        matrix_RE, device = self.matrix_RE, tokens_RE.device
        if self._placed is None or self._placed[0] is not matrix_RE or self._placed[1] != device:
            self._placed = matrix_RE, device, Placed.on(device, matrix_RE, layer.ids)
        is_counted = _is_counted(layer)

        def count(tokens_E: NDArray[np.int64]) -> None:
            layer.group.check_nccl()  # as above
            layer.count.add(tokens_E.copy(), is_counted=is_counted)

        return Exchange.plan_on_device(tokens_RE, self._placed[2], layer.group.rank, self._host, count)

    def _find_padding(self, layer: PlannedLayer, max_tokens: int, top_k: int, device: torch.device) -> Padding:
        key = self.matrix_RE, device, top_k
        if self._padding is None or self._padding[0] is not key[0] or self._padding[1:3] != key[1:]:
            self._padding = *key, Padding.of(self.matrix_RE, layer.ids, max_tokens, top_k, device)
        return self._padding[3]


def _gather(layer: PlannedLayer, counts_E: Tensor) -> Tensor:
    """Gather all ranks' tokens of each expert, and count them in the layer, without a wait; collective."""
    layer.count.begun += layer.group.broken is None
    tokens_RE = step_exchanges.all_gather(counts_E, layer.group)
    layer.count.add(tokens_RE.sum(0), is_counted=_is_counted(layer))
    return tokens_RE


def _is_counted(layer: PlannedLayer) -> bool:
    return layer.training and not checkpointing.is_recomputing()
