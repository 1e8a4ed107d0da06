"""The log of a rank: activations and gradients that it sent to other stages, by step and microbatch.

The log is in host memory. A GPU's tensors are copied to it once nothing on the GPU needs them any more. After a failure
the rank sends from the log instead of computing: see `evermoe.pipeline.localised`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from evermoe.comm.vote import Ballot
from evermoe.moe.token_counts import TokenCount
from evermoe.pipeline.host_copy import BorderDigest, HostCopy, to_host
from evermoe.state.version import step_of


class Forward(NamedTuple):
    """The forward of a microbatch."""

    returned: Any
    """Return value of the stage's module; None unless the script gets it."""
    outputs: tuple[Any, ...]
    """The same as a tuple, as it is sent to the next stage."""
    inputs: list[Any]
    """Tensors whose gradients the backward computes; empty after it."""
    digest: BorderDigest
    """Digest of the input from the previous stage or the script."""


class Backward(NamedTuple):
    """The backward of a microbatch."""

    gradients: tuple[Tensor | HostCopy | None, ...]
    """Gradients of the inputs, which are sent to the previous stage."""
    digest: BorderDigest
    """Digest of the gradients from the next stage."""


class WeightsLeft(NamedTuple):
    """The part of a backward that computes the gradients of weights, if a schedule runs it later."""

    state: Any
    runner: Any


class Loss(NamedTuple):
    """The loss of a microbatch."""

    value: Tensor
    """As the script's function returned it, detached."""
    scaled: Tensor
    """The value whose gradients the schedule computes."""
    digest: BorderDigest
    """Digest of the target."""


@dataclass
class LoggedChunk:
    """Record of one microbatch at one stage."""

    forward: Forward | None = None
    backward: Backward | None = None
    weights_left: WeightsLeft | None = None
    has_weights: bool = False
    """Whether the gradients of weights are computed."""

    def strip(self) -> None:
        """Free the graph and the GPU's memory after the last backward."""
        if self.forward is not None:
            returned, outputs = to_host((self.forward.returned, self.forward.outputs))
            self.forward = Forward(returned, outputs, [], self.forward.digest)
        if self.backward is not None:
            self.backward = Backward(to_host(self.backward.gradients), self.backward.digest)
        self.weights_left = None

    def tensors(self) -> Iterator[Tensor]:
        """Tensors that it keeps for other stages."""
        kept = (*self.forward.outputs,) if self.forward is not None else ()
        kept += self.backward.gradients if self.backward is not None else ()
        data = (each.data if isinstance(each, HostCopy) else each for each in kept)
        return (each for each in data if isinstance(each, Tensor))


@dataclass
class Forwards:
    """Numbers of forwards of microbatches in a process."""

    computed: int = 0
    """Forwards that were computed."""
    resent: int = 0
    """Forwards whose outputs were sent again from the log."""


@dataclass
class LoggedStep:
    """Record of one step on this rank."""

    before: int
    """Version of the state with which it begins."""
    forwards: Forwards
    chunks: dict[tuple[int, int, int], LoggedChunk] = field(default_factory=dict)
    """Records by run of a schedule, stage and microbatch."""
    losses: dict[tuple[int, int], Loss] = field(default_factory=dict)
    """Losses by run and number in it, on ranks of the last stage."""
    gradients: list[Tensor | None] | None = None
    """Gradients of the parameters, while another step uses these; None otherwise."""
    ballot: Ballot | None = None
    """Vote of this rank, once it has voted."""
    is_reduced: bool = False
    """Whether the gradients are the sums over the stage's ranks."""
    has_expert_sums: bool = False
    """Whether the gradients of experts with replicas are sums, too."""
    is_taken: bool = False
    """Whether the vote has passed and the update is applied."""
    is_torn: bool = False
    """Whether a backward, or a sum over replicas, began and did not end, so that some gradients have a part of it."""
    is_distrusted: bool = False
    """Whether another stage sent other bits than before."""
    counts: Sequence[TokenCount] = ()
    """Token counts of the stage's experts in its layers."""
    counted: list[TokenCount] = field(default_factory=list)
    """The same counts at the end of the latest forward; empty before the first one."""

    @property
    def number(self) -> int:
        """Steps taken before it."""
        return step_of(self.before)

    def chunk(self, run: int, stage: int, number: int) -> LoggedChunk:
        """One microbatch's record, empty at first."""
        return self.chunks.setdefault((run, stage, number), LoggedChunk())

    def count_on(self) -> None:
        """Continue the token counts from the latest complete forward, without those of an interrupted one."""
        for count in self.counts:
            count.reset()
        for count, kept in zip(self.counts, self.counted, strict=False):
            count.resume(kept)

    def note_forward(self) -> None:
        """Count a computed forward."""
        self.forwards.computed += 1
        self.counted = [count.copy() for count in self.counts]

    def take(self) -> None:
        """Mark the step as taken, and keep only what may be sent again."""
        self.is_taken, self.gradients = True, None
        for chunk in self.chunks.values():
            chunk.strip()
        self.losses = {
            place: Loss(each.value, each.scaled.detach(), each.digest) for place, each in self.losses.items()
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the logged activations and gradients."""
        found = {each.data_ptr(): each.nbytes for chunk in self.chunks.values() for each in chunk.tensors()}
        return sum(found.values())


class BorderLog:
    """Steps that this rank may have to send again: those since the newest version with complete copies.

    Args:
        parameters: returns those of this rank's stage.
        counts: token counts of its experts in its layers.
    """

    def __init__(self, parameters: Callable[[], Sequence[nn.Parameter]], counts: Sequence[TokenCount] = ()) -> None:
        self._parameters, self._counts = parameters, counts
        self.steps: list[LoggedStep] = []
        """Records in order, without a gap; the last step is in progress, or was taken last."""
        self.forwards = Forwards()

    @property
    def nbytes(self) -> int:
        """Bytes of the logged activations and gradients."""
        return sum(step.nbytes for step in self.steps)

    def find_step(self, number: int) -> LoggedStep | None:
        """The record of a step."""
        return next((step for step in self.steps if step.number == number), None)

    def begin_step(self, version: int) -> LoggedStep:
        """The record of the step that begins with a version: a new one, unless a part of it was computed before.

        Sets the parameters' gradients to those of the record, and continues the token counts from its forwards.
        """
        step = self.find_step(step_of(version))
        if step is not None and not step.is_taken and step.gradients is None:  # it begins again without a recovery
            self.steps.remove(step)
            step = None
        if step is None:
            self.steps.append(step := LoggedStep(version, self.forwards, counts=self._counts))
        for parameter, gradient in zip(self._parameters(), step.gradients or (), strict=False):
            parameter.grad = gradient
        step.count_on()
        step.gradients = None
        return step

    def interrupt(self) -> None:
        """Keep what is complete of the step in progress, which has failed, and its gradients."""
        if not self.steps:
            return
        step = self.steps[-1]
        if step.is_torn or not step.chunks:
            self.steps.pop()
        elif not step.is_taken and step.gradients is None:
            step.gradients = [parameter.grad for parameter in self._parameters()]

    def computed(self) -> list[Any]:
        """Complete records of the step in progress, for JSON; empty if there are none."""
        step = self.steps[-1] if self.steps else None
        if step is None or step.is_taken:
            return []
        chunks = (
            [*place, each.forward is not None, each.backward is not None, each.has_weights]
            for place, each in step.chunks.items()
        )
        return [step.before, step.has_expert_sums, *sorted(chunks)]

    def drop_unfinished(self) -> None:
        """Forget the step in progress."""
        if self.steps and not self.steps[-1].is_taken:
            self.steps.pop()

    def mark_taken(self, after: int) -> None:
        """Mark the step that leads to a version as taken."""
        for step in self.steps:
            if step.number + 1 == step_of(after) and not step.is_taken:
                step.take()
            elif step.number == step_of(after):  # computed in a previous group, whose versions have other numbers
                step.before = after

    def release_before(self, version: int) -> None:
        """Forget the steps before a version whose copies are complete."""
        self.steps = [step for step in self.steps if step.number >= step_of(version)]

    def keep_from(self, version: int) -> None:
        """Keep the steps from the version on that all ranks have agreed on; none if this rank has never had it."""
        places = [place for place, step in enumerate(self.steps) if step.before == version]
        self.steps = self.steps[places[0] :] if places else []

    def clear(self) -> None:
        """Forget all steps."""
        self.steps = []
