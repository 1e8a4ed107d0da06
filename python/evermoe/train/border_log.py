"""What a rank has computed at its stages' borders: activations and gradients that it sent, by step and microbatch.

The log is in host memory; what a GPU has computed goes there once nothing on the GPU needs it any more. After a failure
the rank sends from it again, in place of computing: see `train.localised`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from evermoe.comm.vote import Ballot
from evermoe.moe_load import TokenCount
from evermoe.state.version import step_of
from evermoe.train.host_copy import BorderDigest, HostCopy, to_host


class Forward(NamedTuple):
    """The forward of a microbatch."""

    returned: Any
    """What the stage's module returned; None where it is not returned to the script."""
    outputs: tuple[Any, ...]
    """The same as a tuple: what is sent to the next stage."""
    inputs: list[Any]
    """Tensors whose gradients the backward makes; empty once it has."""
    digest: BorderDigest
    """Of what came from the stage before, or from the script."""


class Backward(NamedTuple):
    """The backward of a microbatch."""

    gradients: tuple[Tensor | HostCopy | None, ...]
    """Of the inputs: what is sent to the stage before."""
    digest: BorderDigest
    """Of what came from the next stage."""


class WeightsLeft(NamedTuple):
    """The part of a backward that makes the gradients of weights, where a schedule runs it later."""

    state: Any
    runner: Any


class Loss(NamedTuple):
    """The loss of a microbatch."""

    value: Tensor
    """As the script's function returned it, detached."""
    scaled: Tensor
    """What the schedule computes gradients of."""
    digest: BorderDigest
    """Of the target."""


@dataclass
class LoggedChunk:
    """What is known of one microbatch at one stage."""

    forward: Forward | None = None
    backward: Backward | None = None
    weights_left: WeightsLeft | None = None
    has_weights: bool = False
    """Whether the gradients of weights are made."""

    def strip(self) -> None:
        """Lets go of the graph, and of a GPU's memory: no backward is left to be computed."""
        if self.forward is not None:
            returned, outputs = to_host((self.forward.returned, self.forward.outputs))
            self.forward = Forward(returned, outputs, [], self.forward.digest)
        if self.backward is not None:
            self.backward = Backward(to_host(self.backward.gradients), self.backward.digest)
        self.weights_left = None

    def tensors(self) -> Iterator[Tensor]:
        """What it keeps for others."""
        kept = (*self.forward.outputs,) if self.forward is not None else ()
        kept += self.backward.gradients if self.backward is not None else ()
        data = (each.data if isinstance(each, HostCopy) else each for each in kept)
        return (each for each in data if isinstance(each, Tensor))


@dataclass
class Forwards:
    """How many forwards of microbatches a process has made."""

    computed: int = 0
    resent: int = 0
    """Whose outputs were sent again from the log."""


@dataclass
class LoggedStep:
    """What this rank has computed of one step."""

    before: int
    """Version of the state that it begins with."""
    forwards: Forwards
    chunks: dict[tuple[int, int, int], LoggedChunk] = field(default_factory=dict)
    """By run of a schedule, stage and microbatch."""
    losses: dict[tuple[int, int], Loss] = field(default_factory=dict)
    """By run and number in it, on ranks of the last stage."""
    gradients: list[Tensor | None] | None = None
    """Of the parameters, while another step uses these; None otherwise."""
    ballot: Ballot | None = None
    """This rank's, once it has voted."""
    is_reduced: bool = False
    """Whether the gradients are the sums over the stage's ranks."""
    is_taken: bool = False
    """Whether the vote has passed, and the update was made."""
    is_torn: bool = False
    """Whether a backward was begun and not ended: some gradients have a part of it."""
    is_distrusted: bool = False
    """Whether what others sent again had other bits than before."""
    counts: Sequence[TokenCount] = ()
    """Tokens of the stage's experts, as its layers count them."""
    counted: list[TokenCount] = field(default_factory=list)
    """The same as they were when the latest forward was whole; empty before the first one."""

    @property
    def number(self) -> int:
        """Steps taken before it."""
        return step_of(self.before)

    def chunk(self, run: int, stage: int, number: int) -> LoggedChunk:
        """One microbatch's record, empty at first."""
        return self.chunks.setdefault((run, stage, number), LoggedChunk())

    def count_on(self) -> None:
        """A forward begins: tokens are counted on from those that are whole, without any that were cut short."""
        for count in self.counts:
            count.forget()
        for count, kept in zip(self.counts, self.counted, strict=False):
            count.resume(kept)

    def note_forward(self) -> None:
        """A forward was computed."""
        self.forwards.computed += 1
        self.counted = [count.copy() for count in self.counts]

    def take(self) -> None:
        """The step was taken: all that is left of it is what is sent again."""
        self.is_taken, self.gradients = True, None
        for chunk in self.chunks.values():
            chunk.strip()
        self.losses = {
            place: Loss(each.value, each.scaled.detach(), each.digest) for place, each in self.losses.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of activations and gradients that are kept."""
        found = {each.data_ptr(): each.nbytes for chunk in self.chunks.values() for each in chunk.tensors()}
        return sum(found.values())


class BorderLog:
    """The steps that this rank may have to send again: those since the newest version whose copies are complete.

    Args:
        parameters: of this rank's stage.
        counts: tokens of its experts, as its layers count them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], counts: Sequence[TokenCount] = ()) -> None:
        self._parameters, self._counts = parameters, counts
        self.steps: list[LoggedStep] = []
        """In order, without a gap; the last one is under way, or was taken last."""
        self.forwards = Forwards()

    @property
    def nbytes(self) -> int:
        """Bytes of activations and gradients that are kept."""
        return sum(step.nbytes for step in self.steps)

    def of(self, number: int) -> LoggedStep | None:
        """The record of a step."""
        return next((step for step in self.steps if step.number == number), None)

    def begin(self, version: int) -> LoggedStep:
        """The record of the step that begins with a version: a new one, unless some of it was computed before.

        The parameters' gradients become those that were made in it, and tokens are counted on from its forwards.
        """
        step = self.of(step_of(version))
        if step is not None and not step.is_taken and step.gradients is None:  # begun anew, without a recovery
            self.steps.remove(step)
            step = None
        if step is None:
            self.steps.append(step := LoggedStep(version, self.forwards, counts=self._counts))
        for parameter, gradient in zip(self._parameters, step.gradients or (), strict=False):
            parameter.grad = gradient
        step.count_on()
        step.gradients = None
        return step

    def interrupt(self) -> None:
        """The step that is under way failed: what is whole of it is kept, its gradients included."""
        if not self.steps:
            return
        step = self.steps[-1]
        if step.is_torn or not step.chunks:
            self.steps.pop()
        elif not step.is_taken and step.gradients is None:
            step.gradients = [parameter.grad for parameter in self._parameters]

    def computed(self) -> list[Any]:
        """What is whole of the step that is under way, as JSON can hold it; empty if none is."""
        step = self.steps[-1] if self.steps else None
        if step is None or step.is_taken:
            return []
        chunks = (
            [*place, each.forward is not None, each.backward is not None, each.has_weights]
            for place, each in step.chunks.items()
        )
        return [step.before, *sorted(chunks)]

    def drop_unfinished(self) -> None:
        """Forgets the step that is under way."""
        if self.steps and not self.steps[-1].is_taken:
            self.steps.pop()

    def taken(self, after: int) -> None:
        """The vote on the step before a version has passed, and its update was made."""
        for step in self.steps:
            if step.number + 1 == step_of(after) and not step.is_taken:
                step.take()
            elif step.number == step_of(after):  # computed before, in a group whose versions had other names
                step.before = after

    def release(self, version: int) -> None:
        """Forgets the steps before a version: its copies are complete."""
        self.steps = [step for step in self.steps if step.number >= step_of(version)]

    def keep_from(self, version: int) -> None:
        """Keeps the steps from a version on, which all ranks have agreed on; none if it is of another history."""
        places = [place for place, step in enumerate(self.steps) if step.before == version]
        self.steps = self.steps[places[0] :] if places else []

    def clear(self) -> None:
        """Forgets all."""
        self.steps = []
