"""Exchange between stages on GPUs through host memory, for gloo, which sends from CPU memory only."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

SENDS = ("get_fwd_send_ops", "get_bwd_send_ops", "_get_init_p2p_neighbors_ops")
READ_BY = {"get_fwd_recv_ops": "forward_one_chunk", "get_bwd_recv_ops": "backward_one_chunk"}
"""By method that returns what a stage receives for a microbatch, the method that computes with it."""


@contextmanager
def through_host(stages: Sequence[Any]) -> Iterator[None]:
    """Route the messages of stages of `torch.distributed.pipelining` through host memory for a block.

    A stage that sends waits for its GPU. Received tensors go to the GPU when the stage computes with them.
    """
    with ExitStack() as stack:
        for stage in stages:
            own = _HostBorder(stage)
            for name in (*SENDS, *READ_BY, *READ_BY.values()):
                if hasattr(stage, name):
                    stack.callback(_put_back, stage, name, stage.__dict__.get(name))
                    setattr(stage, name, own.wrapped(name))
        yield


def _put_back(stage: Any, name: str, before: Any) -> None:
    if before is None:
        delattr(stage, name)
    else:
        setattr(stage, name, before)


class _HostBorder:
    """The border of one stage.

    Args:
        stage: whose methods are wrapped.
    """

    def __init__(self, stage: Any) -> None:
        self._stage = stage
        self._arriving: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
        """By method that computes with them and by microbatch: tensors on the GPU, and those that replace them."""

    def wrapped(self, name: str) -> Callable[..., Any]:
        """The replacement of a method of the stage."""
        original = getattr(self._stage, name)
        if name in SENDS:
            return lambda *args: [_on_host(each) for each in original(*args)]
        if name in READ_BY:
            return lambda number: self._receive(original(number), (READ_BY[name], number))
        return lambda number, *args, **options: self._read(name, original, number, *args, **options)

    def _receive(self, awaited: list[dist.P2POp], place: tuple[str, int]) -> list[dist.P2POp]:
        found = [_on_host(each) for each in awaited]
        self._arriving[place] = [(each.tensor, other.tensor) for each, other in zip(awaited, found, strict=True)]
        return found

    def _read(self, name: str, original: Callable[..., Any], number: int, *args: Any, **options: Any) -> Any:
        for on_gpu, on_host in self._arriving.pop((name, number), ()):
            on_gpu.detach().copy_(on_host)
        return original(number, *args, **options)


def _on_host(each: dist.P2POp) -> dist.P2POp:
    """The same message, of a tensor in host memory."""
    is_sent = each.op is dist.isend
    on_host = each.tensor.detach().cpu() if is_sent else torch.empty_like(each.tensor, device="cpu")
    return dist.P2POp(each.op, on_host, each.peer, each.group, each.tag)
