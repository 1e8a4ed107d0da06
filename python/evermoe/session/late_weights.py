"""Owners send updated weights while the next forward computes, with `Session(shard_optimizer="overlap")`.

    training thread     update │ embedding ─ first ─ second ─ head │ backward
    background thread          └ bucket 0 ─ bucket 1 ─ bucket 2 ┘

A module's forward and `state_dict` wait for the buckets with its own parameters, and no longer. Other code that reads a
weight between an update and the next backward may see its previous value, so this is an option and not the default.

Buckets follow the order in which the model registers its parameters, because most forwards use them in that order.
Backward waits for all buckets, since it sums gradients in the same group.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from evermoe.comm.background_collectives import BackgroundCollectives, Pending
from evermoe.comm.owner_collectives import send_from_owners
from evermoe.errors import PeerLost, UnsupportedState

COMPILED = (
    "shard_optimizer='overlap' makes modules wait for their weights before they compute, which a compiled graph leaves "
    "out: use shard_optimizer=True, or leave out torch.compile"
)


class LateWeights:
    """Lets the modules of a model wait for weights that are sent in the background.

    Args:
        background: sends them, and nothing else until all have arrived.
        model: whose modules wait for their parameters before their forward and their `state_dict`.

    Raises:
        UnsupportedState: the model is compiled.
    """

    def __init__(self, background: BackgroundCollectives, model: nn.Module) -> None:
        self._background = background
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._tasks: list[Pending] = []
        self._waited = 0
        """Number of buckets that have arrived: the modules have waited for the first ones, in order."""
        self._bucket: dict[int, int] = {}
        """Index of the bucket of each parameter, by the parameter's id; empty if no bucket is in flight."""
        if any(isinstance(module, torch._dynamo.OptimizedModule) for module in model.modules()):
            raise UnsupportedState(COMPILED)
        for module in model.modules():
            if next(iter(_used_by(module)), None) is not None:
                self._hooks.append(module.register_forward_pre_hook(self._before_forward, prepend=True))
                self._hooks.append(module.register_state_dict_pre_hook(self._before_state))
                self._hooks.append(module.register_load_state_dict_pre_hook(self._before_state))

    def begin(self, buckets: Iterable[Sequence[Sequence[Tensor]]]) -> None:
        """Begin to send updated weights; collective.

        Args:
            buckets: `[bucket][rank][n]`: weights that each rank owns and has updated, the same on all members.
        """
        for bucket in buckets if self._background.is_available else ():
            self._bucket |= {id(parameter): len(self._tasks) for parameters in bucket for parameter in parameters}
            # Detached, since a script may replace a parameter's data before it is sent, as `EMA.applied` does.
            weights_R = [[each.detach() for each in parameters] for parameters in bucket]
            self._tasks.append(self._background.submit(partial(send_from_owners, weights_R, self._background.group)))

    def _before_forward(self, module: nn.Module, _: object) -> None:
        if torch.compiler.is_compiling():
            raise UnsupportedState(COMPILED)
        try:
            self._wait_for(_used_by(module))
        except PeerLost:
            if not self._background.finishes_steps:
                raise

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

    def wait_in_step(self) -> None:
        """Wait as `wait` does, inside a step. It may run to its end without the weights of a lost member."""
        try:
            self.wait()
        except PeerLost:
            if not self._background.finishes_steps:
                raise

    def _wait(self, number: int) -> None:
        if number > self._waited:
            self._background.wait(self._tasks[self._waited : number])
            self._waited = number
        if self._waited == len(self._tasks):
            self.forget()

    def forget(self) -> None:
        """Wait for nothing any more: all weights have arrived, or will be sent again."""
        self._tasks, self._bucket, self._waited = [], {}, 0

    def __deepcopy__(self, _: object) -> LateWeights:
        """Return this object, so that a model with its hooks can be copied.

        The copy's hooks wait for nothing, since its parameters are in no bucket.
        """
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _Arrived, ()

    def close(self) -> None:
        """Remove the hooks."""
        self.forget()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


class _Arrived:
    """Hooks of a model that was loaded from a file: they wait for nothing."""

    def _before_forward(self, *_: object) -> None: ...

    def _before_state(self, *_: object) -> None: ...


def _used_by(module: nn.Module) -> Iterator[nn.Parameter]:
    """Return the parameters that a module's own forward may read.

    A module of `torch.nn` may read its children's parameters without calling them, as `MultiheadAttention` does.
    """
    is_container = isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
    yield from module.parameters(recurse=type(module).__module__.startswith("torch.nn.") and not is_container)
    for child in module.children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):
            yield from child.parameters()
