"""Weights that owners send while the next step's forward computes, each bucket before the modules that need it.

    update ─ VOTE's step is over ──embedding──first──second──head── backward
    thread    └ bucket 0 ─── bucket 1 ─── bucket 2 ┘

A module's forward, and its `state_dict`, wait for the buckets of its own parameters. Code that reads a weight
in another way between an update and the next step's backward may find an older value, so this is an option.

Buckets have the parameters in the order in which the model registers them, as most forwards use them. All have come
before the backward begins, whose sums use the same group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evermoe.comm.collectives import BUCKET_BYTES, buckets, send_from_owners
from evermoe.comm.group import Group
from evermoe.comm.task import Task
from evermoe.errors import PeerLost, UnsupportedState

COMPILED = (
    "shard_optimizer='overlap' makes modules wait for their weights before they compute, which a compiled graph leaves "
    "out: use shard_optimizer=True, or leave out torch.compile"
)


class LateWeights:
    """Sends updated weights in buckets, in a background thread during the forward.

    Args:
        group: of those that train, in which nothing else is exchanged meanwhile.
        trainers: those members' group for all else.
    """

    def __init__(self, group: Group, trainers: Group) -> None:
        self._group, self._trainers = group, trainers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evermoe-weights")
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._tasks: list[Task[None]] = []
        self._waited = 0
        """Buckets that the modules have waited for."""
        self._bucket: dict[int, int] = {}
        """Number of each parameter's bucket, by its id, while some are under way."""

    def attach(self, model: nn.Module) -> None:
        """Make the modules of a model wait for their parameters before they compute or return their state.

        Raises:
            UnsupportedState: a parameter is not on the CPU, or the model is compiled.
        """
        device = next((p.device for p in model.parameters() if p.device.type != "cpu"), None)
        if device is not None:
            raise UnsupportedState(f"shard_optimizer='overlap' is for models on CPUs, and this one is on {device}")
        if any(isinstance(module, torch._dynamo.OptimizedModule) for module in model.modules()):
            raise UnsupportedState(COMPILED)
        for module in model.modules():
            if next(iter(_used_by(module)), None) is not None:
                self._hooks.append(module.register_forward_pre_hook(self._before_forward, prepend=True))
                self._hooks.append(module.register_state_dict_pre_hook(self._before_state))
                self._hooks.append(module.register_load_state_dict_pre_hook(self._before_state))

    def begin(self, updated_R: Sequence[Sequence[Tensor]]) -> None:
        """Begin to send the weights `[rank][n]` that each rank owns and has updated; the same on all members."""
        for number, bucket in enumerate(buckets(updated_R, BUCKET_BYTES)):
            self._bucket |= {id(parameter): number for parameters in bucket for parameter in parameters}
            # A script may replace a parameter's data meanwhile, as `EMA.applied` does: that is not sent.
            task = Task(partial(self._send, [[each.detach() for each in parameters] for parameters in bucket]))
            self._tasks.append(task)
            self._thread.submit(task.run)

    @torch.no_grad()
    def _send(self, bucket: Sequence[Sequence[Tensor]]) -> None:
        try:
            send_from_owners(bucket, self._group)
        except PeerLost:
            self._trainers.timed_out = self._trainers.timed_out or self._group.timed_out
            raise

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if torch.compiler.is_compiling():
            raise UnsupportedState(COMPILED)
        self._wait_for(_used_by(module))

    def _before_state(self, module: nn.Module, *_: object) -> None:
        self._wait_for(_used_by(module))

    def _wait_for(self, parameters: Iterable[Tensor]) -> None:
        if self._bucket:
            self._wait(1 + max((self._bucket.get(id(parameter), -1) for parameter in parameters), default=-1))

    def wait(self) -> None:
        """Wait until all weights have come.

        Raises:
            PeerLost: a member is gone. The weights are mixed until a recovery has sent all again.
        """
        self._wait(len(self._tasks))

    def _wait(self, number: int) -> None:
        if number > self._waited:
            done: list[bool] = []
            self._trainers.on_wait(True)
            try:
                done = [task.wait() for task in self._tasks[self._waited : number]]
            finally:
                self._trainers.on_wait(False, bool(done) and all(done))
            if not all(done):
                raise PeerLost(next(task.lost for task in self._tasks if task.lost is not None))
            self._waited = number
        if self._waited == len(self._tasks):
            self._clear()

    def end(self) -> None:
        """Wait until the thread does nothing more; where weights are under way, the group has been dropped before."""
        for task in self._tasks:
            task.is_over_within(threading.TIMEOUT_MAX)
        self._clear()

    def __deepcopy__(self, _: object) -> LateWeights:
        """Return this object: a copy of a model shares it, and waits for nothing, since its parameters are its own."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return LateWeights, (Group(), Group())

    def _clear(self) -> None:
        self._tasks, self._bucket, self._waited = [], {}, 0

    def close(self) -> None:
        """End the thread, and the waits of the modules."""
        self.end()
        self._thread.shutdown()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _used_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters that a module's own forward may read.

    A module of torch may read its children's without a call of them, as `MultiheadAttention` does.
    """
    is_container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    yield from module.parameters(recurse=type(module).__module__.startswith("torch.nn.") and not is_container)
    for child in module.children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            yield from child.parameters()
