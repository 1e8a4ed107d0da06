"""Recording of transfers by `evermoe`'s groups and `torch.distributed`, and of copies between host and GPU.

The methods of `torch.distributed.ProcessGroup` are wrapped. Every Python function of `torch.distributed` calls them,
whichever module imported it. Collectives that C++ code starts (DistributedDataParallel's buckets, functional
collectives of compiled graphs) are not recorded.

A transfer that continues after its call has returned ends

* on a GPU, when its stream has completed it: at an event on a stream that waits for the future of the `Work`;
* on the CPU, when gloo calls back through that future;
* for a `Work` without future (gloo's sends and receives, NCCL's batches), when a `wait()` for it returns. Without a
  wait in time the recorded end is too late, never too early, so that a window is never overestimated.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from evermoe.comm.group import Group
from evermoe.planning.windows import Kind
from evermoe.profile.patches import Patches
from evermoe.profile.recorder import OpenSpan, Recorder

_CPU = torch.device("cpu")

COLLECTIVES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}
"""Methods of `ProcessGroup`, and the names of their spans."""


def attach_torch(recorder: Recorder, patches: Patches) -> None:
    """Wrap the methods of all process groups, and `Work.wait`."""
    ranks = _Ranks()
    batches: threading.local = threading.local()
    for method, name in COLLECTIVES.items():

        def describe(group: Any, *values: Any, name: str = name) -> tuple[str, Kind, Sequence[int]]:
            return name, "collective", ranks.others(group)

        patches.replace(dist.ProcessGroup, method, functools.partial(_started, recorder, batches, describe))

    def send(group: Any, tensors: Any, peer: int, *_: Any) -> tuple[str, Kind, Sequence[int]]:
        to = ranks.of(group)[peer]
        return f"send to {to}", "send", (to,)

    def receive(group: Any, tensors: Any, peer: int, *_: Any) -> tuple[str, Kind, Sequence[int]]:
        source = ranks.of(group)[peer]
        return f"receive from {source}", "receive", (source,)

    def receive_any(group: Any, *_: Any) -> tuple[str, Kind, Sequence[int]]:
        return "receive from any", "receive", ()

    for method, describe_one in (("send", send), ("recv", receive), ("recv_anysource", receive_any)):
        patches.replace(dist.ProcessGroup, method, functools.partial(_started, recorder, batches, describe_one))
    patches.replace(dist.ProcessGroup, "_start_coalescing", functools.partial(_batch_begins, batches))
    patches.replace(dist.ProcessGroup, "_end_coalescing", functools.partial(_batch_ends, recorder, batches))
    patches.replace(dist.Work, "wait", functools.partial(_waited, recorder))


class _Ranks:
    """Global ranks of groups, cached."""

    def __init__(self) -> None:
        self._known: weakref.WeakKeyDictionary[Any, tuple[list[int], list[int]]] = weakref.WeakKeyDictionary()

    def of(self, group: Any) -> list[int]:
        return self._both(group)[0]

    def others(self, group: Any) -> list[int]:
        return self._both(group)[1]

    def _both(self, group: Any) -> tuple[list[int], list[int]]:
        found = self._known.get(group)
        if found is None:
            try:
                ranks = dist.get_process_group_ranks(group)
            except (KeyError, ValueError, RuntimeError):  # a group that torch.distributed did not create
                ranks = list(range(group.size()))
            mine = group.rank()
            found = self._known[group] = (ranks, [rank for at, rank in enumerate(ranks) if at != mine])
        return found


def _started(
    recorder: Recorder,
    batches: threading.local,
    describe: Callable[..., tuple[str, Kind, Sequence[int]]],
    original: Callable[..., Any],
) -> Callable[..., Any]:
    """Wrap a method that starts a transfer and returns its `Work`."""

    @functools.wraps(original)
    def call(group: Any, *arguments: Any, **keywords: Any) -> Any:
        span = None
        if recorder.on:
            name, kind, peers = describe(group, *arguments, *keywords.values())
            size, device = _moved((*arguments, *keywords.values()))
            span = recorder.begin(name, kind, "network", size, peers, device)
        if span is None:
            return original(group, *arguments, **keywords)
        try:
            work = original(group, *arguments, **keywords)
        except BaseException:
            recorder.drop(span)
            raise
        recorder.leave(span)
        batch: list[OpenSpan] | None = getattr(batches, "spans", None)
        if batch is None:
            _follow(recorder, work, [span])
        else:
            batch.append(span)
        return work

    return call


def _batch_begins(batches: threading.local, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        result = original(*arguments, **keywords)
        batches.spans = []
        return result

    return call


def _batch_ends(recorder: Recorder, batches: threading.local, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        spans, batches.spans = getattr(batches, "spans", None), None
        work = original(*arguments, **keywords)
        if spans:
            _follow(recorder, work, spans)
        return work

    return call


def _follow(recorder: Recorder, work: Any, spans: Sequence[OpenSpan]) -> None:
    """Record the end of the spans when `work` is complete."""
    if work is None:
        for span in spans:
            recorder.end(span)
        return
    recorder.follow(work, spans)
    if spans[0].kind != "collective" and spans[0].device == _CPU:
        return  # gloo's work has no future, and the exception about that costs as much as ten spans
    try:
        future = work.get_future()
    except (RuntimeError, NotImplementedError):
        return
    if future is not None:
        # On a GPU the callback runs at once, with a stream as the current one that waits for the transfer.
        future.then(functools.partial(_over, recorder, spans))


def _over(recorder: Recorder, spans: Sequence[OpenSpan], future: Any) -> None:
    for span in spans:
        recorder.end(span)


def _waited(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wait(work: Any, *arguments: Any, **keywords: Any) -> Any:
        result = original(work, *arguments, **keywords)
        recorder.waited(work)
        return result

    return wait


def attach_group(recorder: Recorder, patches: Patches) -> None:
    """Wrap the methods of `evermoe.comm.group.Group`, which wait until the transfer is complete."""
    for method in ("all_reduce", "all_gather", "all_to_all"):

        def describe(group: Group, *_: Any, method: str = method) -> tuple[str, Kind, Sequence[int]]:
            return method, "collective", [rank for rank in range(group.size) if rank != group.rank]

        patches.replace(Group, method, functools.partial(_whole, recorder, describe))
    patches.replace(Group, "exchange", functools.partial(_whole, recorder, _exchange))
    patches.replace(Group, "_transfer", functools.partial(_unseen, recorder))


def _unseen(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    """Exclude transfers in the background: they keep nothing busy that training needs. `Courier.sent` has them."""

    @functools.wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        with recorder.unseen("network"):
            return original(*arguments, **keywords)

    return call


def _exchange(group: Group, sends: Any, receives: Any, *options: Any) -> tuple[str, Kind, Sequence[int]]:
    peers = sorted({rank for _, rank in (*sends, *receives)})
    if not receives and len(peers) == len(sends) == 1:
        return f"send to {peers[0]}", "send", peers
    if not sends and len(peers) == len(receives) == 1:
        return f"receive from {peers[0]}", "receive", peers
    return "exchange", "collective", peers


def _whole(
    recorder: Recorder, describe: Callable[..., tuple[str, Kind, Sequence[int]]], original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(group: Group, *arguments: Any, **keywords: Any) -> Any:
        span = None
        if recorder.on and group.size > 1:
            name, kind, peers = describe(group, *arguments, **keywords)
            size, device = _moved((*arguments, *keywords.values()))
            span = recorder.begin(name, kind, "network", size, peers, device) if peers else None
        if span is None:
            return original(group, *arguments, **keywords)
        try:
            result = original(group, *arguments, **keywords)
        except BaseException:
            recorder.drop(span)
            raise
        recorder.close(span)
        return result

    return call


def attach_copies(recorder: Recorder, patches: Patches) -> None:
    """Wrap methods of tensors that move bytes between the host and a device."""
    for method in ("to", "cpu", "cuda", "copy_"):
        patches.replace(torch.Tensor, method, functools.partial(_copied, recorder))


def _copied(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(tensor: Any, *arguments: Any, **keywords: Any) -> Any:
        if torch.compiler.is_compiling() or not recorder.on:
            return original(tensor, *arguments, **keywords)
        start = recorder.clock.mark()
        result = original(tensor, *arguments, **keywords)
        other = arguments[0] if arguments and original.__name__ == "copy_" else tensor
        if isinstance(other, torch.Tensor) and (other.device.type == "cpu") != (result.device.type == "cpu"):
            up = result.device.type != "cpu"
            span = recorder.begin("copy to device" if up else "copy to host", "copy", "host_link", result.nbytes)
            if span is not None:
                span.start = start
                recorder.close(span)
        return result

    return call


def _moved(values: Sequence[Any]) -> tuple[int, torch.device | None]:
    """Return the bytes of the larger of input and output, and its device."""
    largest, device = 0, None
    for value in values:
        size, found = _size(value)
        if found is not None and (device is None or size > largest):
            largest, device = size, found
    return largest, device


def _size(value: Any) -> tuple[int, torch.device | None]:
    if isinstance(value, torch.Tensor):
        return value.nbytes, value.device
    size, device = 0, None
    if isinstance(value, (list, tuple)):
        for each in value:
            more, found = _size(each)
            size, device = size + more, device or found
    return size, device
