"""Owners send updated weights while the next forward computes, with `Session(shard_optimizer="overlap")`.

    training thread     update │ embedding ─ first ─ second ─ head │ backward
    background thread          └ bucket 0 ─ bucket 1 ─ bucket 2 ┘

A module's forward and `state_dict` wait for the buckets with its own parameters, and no longer. Other code that reads a
weight between an update and the next backward may see its previous value, so this is an option and not the default.

Buckets follow the order in which the model registers its parameters, because most forwards use them in that order.
Backward waits for all buckets, since it sums gradients in the same group.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evermoe.comm.collectives import buckets, send_from_owners
from evermoe.comm.group import Group
from evermoe.comm.task import Task
from evermoe.errors import PeerLost, UnsupportedState
from evermoe.planning.footprint import BUCKET_BYTES

COMPILED = (
    "shard_optimizer='overlap' makes modules wait for their weights before they compute, which a compiled graph leaves "
    "out: use shard_optimizer=True, or leave out torch.compile"
)


class LateWeights:
    """Sends updated weights in buckets, in a background thread during the forward.

    Args:
        group: group of the members that train. Nothing else is sent in it until all weights have arrived.
        trainers: these members' group for all other collectives.
    """

    def __init__(self, group: Group, trainers: Group) -> None:
        self._group, self._trainers = group, trainers
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evermoe-weights")
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._tasks: list[Task[None]] = []
        self._waited = 0
        """Number of buckets that have arrived: the modules have waited for the first ones, in order."""
        self._bucket: dict[int, int] = {}
        """Index of the bucket of each parameter, by the parameter's id; empty if no bucket is in flight."""

    def attach(self, model: nn.Module) -> None:
        """Register hooks: each module of a model waits for its parameters before its forward and its `state_dict`.

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
        """Begin to send updated weights in the background; collective.

        Args:
            updated_R: `[rank][n]`: weights that each rank owns and has updated, the same on all members.
        """
        for number, bucket in enumerate(buckets(updated_R, BUCKET_BYTES)):
            self._bucket |= {id(parameter): number for parameters in bucket for parameter in parameters}
            # Detached, since a script may replace a parameter's data before it is sent, as `EMA.applied` does.
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
        """Wait until all weights have arrived.

        Raises:
            PeerLost: a member is lost. Some weights are older than others until a recovery has sent all again.
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
        """Wait until the background thread is idle. If weights are in flight, the group must have been dropped."""
        for task in self._tasks:
            task.is_over_within(threading.TIMEOUT_MAX)
        self._clear()

    def __deepcopy__(self, _: object) -> LateWeights:
        """Return this object, so that a model with its hooks can be copied.

        The copy's hooks wait for nothing, since its parameters are in no bucket.
        """
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return LateWeights, (Group(), Group())

    def _clear(self) -> None:
        self._tasks, self._bucket, self._waited = [], {}, 0

    def close(self) -> None:
        """End the thread and remove the hooks."""
        self.end()
        self._thread.shutdown()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def _used_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters that a module's own forward may read.

    A module of `torch.nn` may read its children's parameters without calling them, as `MultiheadAttention` does.
    """
    is_container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    yield from module.parameters(recurse=type(module).__module__.startswith("torch.nn.") and not is_container)
    for child in module.children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            yield from child.parameters()
