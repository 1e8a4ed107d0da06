"""One attempt at a step of a pipeline: schedules that run in it, their losses, and the sum of gradients over peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from torch import Tensor, nn

from evermoe.comm.group import Group
from evermoe.errors import UnsupportedState
from evermoe.options import checked
from evermoe.pipeline.border_log import LoggedStep, Loss
from evermoe.pipeline.host_borders import through_host
from evermoe.pipeline.logged_stages import OtherData, compare, digest_of, logged, stages_of
from evermoe.pipeline.peer_sums import sum_again, sum_over
from evermoe.process.seeds import seed_all
from evermoe.session.step import check_count, check_loss, detached
from evermoe.session.step_calls import Attempt, compare_attempts

if TYPE_CHECKING:
    from evermoe.pipeline.connections import TorchConnections

LossFunction = Callable[[Any, Any], Tensor]
"""Function of a microbatch's output and target that returns one number."""


class PipelineMicroBatch:
    """A part of a pipeline's step, as `PipelineStep.micro_batches` yields it."""

    def __init__(self, step: PipelineStep, number: int, parts: int) -> None:
        self.number, self.parts = number, parts
        self._step = step

    def of(self, batch: Tensor) -> Tensor:
        """This part's rows of a batch `[n, …]`, of which each part has as many.

        Raises:
            ValueError: the rows cannot be divided evenly; stages exchange tensors of fixed shapes.
        """
        if len(batch) % self.parts:
            raise ValueError(f"micro_batches: expected rows that {self.parts} parts divide evenly, got {len(batch)}")
        size = len(batch) // self.parts
        return batch[self.number * size : (self.number + 1) * size]

    def run(
        self, *inputs: Any, target: Any = None, count: float | Tensor | None = None, **keywords: Any
    ) -> list[Tensor]:
        """Run the schedule for this part: see `PipelineStep.run`."""
        return self._step.run(*inputs, target=target, count=count, **keywords)


class StepHooks(Protocol):
    """Callbacks of a pipeline's session at the ends of a step's block."""

    def begin_step(self, step: PipelineStep) -> None:
        """Begin the step, whose block is entered."""

    def commit_step(self, step: PipelineStep) -> None:
        """Reduce, vote and update, since the block has ended without an error. May raise what `fail_step` handles."""

    def fail_step(self, step: PipelineStep, error: BaseException) -> bool:
        """Handle an error that has ended the block or the commit. Return whether a lost rank explains it."""


class StepRuns:
    """Runs of schedules in a step, and the losses that this rank has computed in them."""

    def __init__(self) -> None:
        self.begun = 0
        """Runs that this rank has begun."""
        self.loss: Tensor | None = None
        """Sum of this rank's losses; None before the first, and on ranks that compute none."""
        self.count: float | Tensor | None = None
        """Sum of this rank's counts; None where losses are means."""
        self.losses = 0
        """Microbatches whose loss this rank has computed."""
        self.is_running = False
        """Whether a run is in progress."""
        self._losses_before = 0
        """Losses of the previous runs."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """Begin a run, which the block computes."""
        self.begun += 1
        self._losses_before = self.losses
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    @property
    def place(self) -> tuple[int, int]:
        """Number of the latest run, and number in it of the next loss."""
        return self.begun - 1, self.losses - self._losses_before

    def add_loss(self, value: Tensor) -> None:
        """Add the loss of a microbatch."""
        self.losses += 1
        self.loss = value if self.loss is None else self.loss + value

    def add_count(self, count: float | Tensor | None) -> None:
        """Add the count of the run that has ended.

        Raises:
            ValueError: this rank has computed no loss in it, or counts were given in some runs only.
        """
        if self.losses == self._losses_before:
            if count is not None:
                raise ValueError(
                    "step.run: count was given on a rank that has computed no loss: give it where the last stage is"
                )
        elif self._losses_before and (count is None) != (self.count is None):
            raise ValueError("step.run: count was given in some runs of this step; give it in all, or in none")
        elif count is not None:
            self.count = (0.0 if self.count is None else self.count) + detached(count)


class PipelineStep:
    """One attempt at a step: call `step.run(...)` inside `with step:`.

    Leaving the block sums the gradients over the stage's ranks, votes, steps the optimizer and begins to copy the new
    version. If a rank is lost, the block ends early without an exception, and the session's next step is the same one.

    Args:
        number: steps committed before this one.
        schedule: of `torch.distributed.pipelining`.
        parameters: of this rank's stage, which all its ranks hold.
        connections: torch's groups.
        generation: of the group that computes it.
        hooks: of the session.
    """

    def __init__(
        self,
        number: int,
        schedule: Any,
        parameters: Sequence[nn.Parameter],
        connections: TorchConnections,
        generation: int,
        hooks: StepHooks,
    ) -> None:
        self.number = number
        """Steps committed before this one."""
        self.committed = False
        """Whether all ranks have agreed on the step and applied it."""
        self.runs = StepRuns()
        self.is_open = self.was_entered = False
        """Whether the script is inside `with step:`, and whether it ever was."""
        self.past: LoggedStep | None = None
        """Record of what this rank computes in the step, also before a failure; None to log nothing."""
        self._schedule, self._parameters, self._connections = schedule, parameters, connections
        self._generation, self._hooks = generation, hooks
        self._scale, self._is_repeated = 1.0, False
        self._seeds: tuple[int, ...] = (0,)
        self._has_ended = False

    def prepare(self, past: LoggedStep | None, *, is_repeated: bool, scale: float, seeds: tuple[int, ...]) -> None:
        """Set the inputs of the computation, as the step's block is entered.

        Args:
            past: record of what this rank computes in it.
            is_repeated: whether some ranks may have computed a part of it before; the same on all ranks.
            scale: factor of the losses.
            seeds: numbers from which, with the step and the microbatch, random numbers are drawn.
        """
        self.past, self._is_repeated, self._scale, self._seeds = past, is_repeated, scale, seeds

    # ---- what the script calls

    def run(
        self, *inputs: Any, target: Any = None, count: float | Tensor | None = None, **keywords: Any
    ) -> list[Tensor]:
        """Run the schedule: forwards and backwards of all microbatches, whose gradients add up over the step's runs.

        The step's gradient is that of the mean of all microbatches' losses, over all runs and data-parallel peers,
        whether or not the schedule has `scale_grads`.

        Args:
            inputs: of the first stage; other ranks may give them, too, and do not read them.
            target: of the last stage; other ranks may give it, too.
            count: number over which the losses of this run are sums, all microbatches together, 0 or more: tokens that
                are not padding, for example. The step's gradient is then that of the sum of all losses divided by the
                sum of all counts. The ranks that compute the loss give it: on all peers or none.
            keywords: keyword inputs of each stage's module.

        Returns:
            The loss of each microbatch as the script's function returned it, detached; empty on ranks without the
            last stage.

        Raises:
            ValueError: a count that is no number, or of a rank that computes no loss, or in some runs only.
            UnsupportedState: the loss is scaled already, or this is outside of `with step:`.
        """
        if not self.is_open:
            raise UnsupportedState("step.run was called outside of `with step:`")
        check_count(count)
        schedule, losses = self._schedule, list[Tensor]()
        divides, schedule.scale_grads = schedule.scale_grads, False  # the session divides, by what all ranks have
        try:
            with self.runs.running(), ExitStack() as stack:
                stages = stages_of(schedule)
                own = inputs if not stages or any(stage.is_first for stage in stages) else ()
                if target is not None and any(stage.is_last for stage in stages):
                    keywords["target"] = target
                stack.enter_context(logged(stages, self.past, self.runs.begun - 1, self._draw))
                if self._connections.uses_host:
                    stack.enter_context(through_host(stages))
                schedule.step(*own, losses=losses, return_outputs=False, **keywords)
        except OtherData:
            assert self.past is not None
            self.past.is_distrusted = True
            raise
        finally:
            schedule.scale_grads = divides
        self.runs.add_count(count)
        return [loss.detach() / self._scale for loss in losses]

    def micro_batches(self, n: int) -> Iterator[PipelineMicroBatch]:
        """Return the n parts of a step whose gradients are accumulated: one run of the schedule for each.

            for part in step.micro_batches(4):
                part.run(part.of(inputs), target=part.of(target))

        All ranks need the same n: stages exchange in each run.

        Raises:
            ValueError: n is below 1.
        """
        checked("n", n, int, least=1)
        return (PipelineMicroBatch(self, number, n) for number in range(n))

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        """Raise an error: the schedule runs the backward.

        Raises:
            UnsupportedState: always.
        """
        raise UnsupportedState(
            "step.backward: a pipeline's schedule runs the backward passes of its microbatches itself. Give the "
            "schedule loss_fn=session.loss_function(...) and call step.run(...)"
        )

    def __enter__(self) -> PipelineStep:
        self.is_open = self.was_entered = True
        self._hooks.begin_step(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if error is not None:
            self.is_open = False
            return self._hooks.fail_step(self, error)
        try:
            self._hooks.commit_step(self)
        except BaseException as failure:
            if not self._hooks.fail_step(self, failure):
                raise
        return False

    # ---- what the session calls

    def weigh(self, compute: LossFunction, output: Any, target: Any) -> Tensor:
        """A microbatch's loss, of which the schedule computes gradients.

        Args:
            compute: the script's function.
            output: of the last stage.
            target: for it.

        Raises:
            ValueError: it is no tensor of one number that depends on parameters.
            UnsupportedState: the schedule is not run by `step.run`.
        """
        if not self.runs.is_running:
            raise UnsupportedState(
                "a loss of session.loss_function was computed outside of step.run: call step.run(...) in place of "
                "schedule.step(...), which would divide the gradients once more"
            )
        loss = self._loss(compute, output, target)
        self.runs.add_loss(loss.value)
        return loss.scaled

    def _loss(self, compute: LossFunction, output: Any, target: Any) -> Loss:
        known = {} if self.past is None else self.past.losses
        place = self.runs.place
        digest = digest_of(() if self.past is None else target)
        if place in known:
            compare(digest, known[place].digest, f"step {self.number}: the target of microbatch {place[1]}")
            return known[place]
        loss = compute(output, target)
        check_loss(loss, "loss_function")
        known[place] = Loss(loss.detach(), loss if self._scale == 1 else loss * self._scale, digest)
        return known[place]

    def _draw(self, run: int, stage: int, microbatch: int) -> None:
        """Seed the random numbers of a microbatch, so that it can be computed again alone."""
        seed_all(*self._seeds, self.number, run, stage, microbatch)

    def end(self) -> None:
        """Sum the step's gradients over the stage's ranks, once the script has computed all. Collective among these.

        A parameter that has no gradient on any of them keeps none.

        Raises:
            UnsupportedState: the script has run no schedule. RuntimeError: of torch, a peer is lost.
        """
        self.is_open, self._has_ended = False, True
        if not self.runs.begun:
            raise UnsupportedState("step.run(...) was not called inside `with step:`")
        group, past = self._connections.data_parallel_group, self.past
        was_applied = past is not None and past.is_taken  # then by all of them, and no gradients are left
        if group is not None and self._is_repeated and not was_applied:
            sum_again(self._parameters, group, is_summed=past is not None and past.is_reduced)
        elif group is not None and not was_applied:
            sum_over(self._parameters, group)
        if past is not None:
            past.is_reduced = True

    def attempt(self) -> Attempt:
        """Return a summary of the runs that this rank has begun in the step."""
        return {
            "step": self.number,
            "generation": self._generation,
            "runs": self.runs.begun,
            "has_ended": self._has_ended,
        }


def refuse_unequal_runs(mine: PipelineStep | None, group: Group) -> None:
    """Compare the runs that all ranks had begun when they were interrupted; collective.

    A rank that ended its step after fewer runs than another has begun would never have met it.

    Raises:
        UnequalForwards: names the ranks, and what they have run.
    """

    def difference(ended: Attempt, other: Attempt) -> str | None:
        if other["runs"] <= ended["runs"]:
            return None
        return (
            f"rank {other['rank']} of the pipeline ran {other['runs']} schedules, rank {ended['rank']} ran "
            f"{ended['runs']}. Stages exchange in each run, so all ranks must run as many in each step: "
            "`for part in step.micro_batches(n)` with the same n"
        )

    compare_attempts(None if mine is None else mine.attempt() | {"rank": group.rank}, group, difference)
