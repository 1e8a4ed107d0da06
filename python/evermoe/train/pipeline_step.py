"""One attempt at a step of a pipeline: schedules that run in it, their losses, and the sum of gradients over peers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor, nn

from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.errors import UnequalForwards, UnsupportedState
from evermoe.options import checked
from evermoe.seeds import seed_all
from evermoe.train.border_log import LoggedStep, Loss
from evermoe.train.host_borders import through_host
from evermoe.train.logged_stages import OtherData, compare, digest_of, logged, stages_of
from evermoe.train.peer_sums import sum_again, sum_over
from evermoe.train.step import check_count, check_loss, detached

LossFunction = Callable[[Any, Any], Tensor]
"""Of a microbatch's output and target: one number."""


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

    def run(self, schedule: Any, *inputs: Any, count: float | Tensor | None = None, **options: Any) -> Any:
        """Runs the schedule for this part: as `PipelineStep.run` does."""
        return self._step.run(schedule, *inputs, count=count, **options)


class PipelineStep:
    """One attempt at a step. Inside `with session.begin() as step:` call `step.run(schedule, …)` and `step.reduce(…)`.

    Leaving the block commits. What is raised inside, PeerLost and torch's RuntimeError too, leaves it uncommitted, and
    the loop recovers.

    Args:
        number: steps committed before this one.
        parameters: of this rank's stage.
        peers: ranks of the stage.
        scale: what losses are multiplied by.
        generation: of the group that computes it.
        commit: called when the block is left.
        past: what was computed of it before a failure, and is computed now; None to log nothing.
        is_repeated: whether some ranks may have computed a part of it before; the same on all ranks.
        seeds: numbers from which, with the step and the microbatch, random numbers are drawn.
        uses_host: whether what stages exchange goes through host memory.
    """

    def __init__(
        self,
        number: int,
        parameters: Sequence[nn.Parameter],
        *,
        peers: int,
        scale: float,
        generation: int,
        commit: Callable[[], object],
        past: LoggedStep | None = None,
        is_repeated: bool = False,
        seeds: tuple[int, ...] = (0,),
        uses_host: bool = False,
    ) -> None:
        self.number = number
        """Steps committed before this one."""
        self.committed = False
        """Whether all ranks have agreed on the step and taken it."""
        self.loss: Tensor | None = None
        """Sum of this rank's losses; None before the first, and on ranks that compute none."""
        self.count: float | Tensor | None = None
        """What this rank has counted; None where losses are means."""
        self.losses = 0
        """Microbatches whose loss this rank has computed."""
        self.runs = 0
        """Runs of schedules that this rank has begun."""
        self.is_open = False
        """Whether the script is inside `with`."""
        self._parameters, self._peers, self._scale = parameters, peers, scale
        self._generation, self._commit = generation, commit
        self.past, self._is_repeated, self._seeds = past, is_repeated, seeds
        self._uses_host = uses_host
        self._losses_before = 0
        """Losses of the runs before the one that is under way."""
        self._is_running = self._is_reduced = self._has_ended = False

    # ---- what the script calls

    def run(
        self,
        schedule: Any,
        *inputs: Any,
        count: float | Tensor | None = None,
        losses: list[Tensor] | None = None,
        **options: Any,
    ) -> Any:
        """Runs `schedule.step(*inputs, losses=losses, **options)`, whose gradients are added to those that are there.

        The step's gradient is that of the mean of all microbatches' losses, of all runs and data-parallel peers;
        whether the schedule has `scale_grads` says nothing here.

        Args:
            schedule: of `torch.distributed.pipelining`, with a loss function made by `PipelineSession.loss_function`.
            inputs: of the first stage.
            count: over how much the losses of this run are sums, all microbatches together, 0 or more: tokens that are
                not padding, for example. The step's gradient is then that of the sum of all losses divided by the
                sum of all counts. To be given on ranks that compute the loss, of all peers or none.
            losses: is filled with the losses as the script's function has returned them, detached.
            options: `target=` on the last stage.

        Returns:
            What the schedule returns.

        Raises:
            ValueError: no schedule; a count that is no number, of a rank that computes no loss, or of some runs alone.
            UnsupportedState: the loss is scaled already.
        """
        if not (hasattr(schedule, "scale_grads") and hasattr(schedule, "step")):
            kind = type(schedule).__name__
            raise ValueError(f"step.run: expected a schedule of torch.distributed.pipelining, got {kind}")
        check_count(count)
        self.runs += 1
        before, own = self.losses, None if losses is None else list[Tensor]()
        self._losses_before = before
        divides, schedule.scale_grads = schedule.scale_grads, False  # the session divides, by what all ranks have
        self._is_running = True
        try:
            stages = stages_of(schedule)
            with ExitStack() as stack:
                stack.enter_context(logged(stages, self.past, self.runs - 1, self._draw))
                if self._uses_host:
                    stack.enter_context(through_host(stages))
                output = schedule.step(*inputs, losses=own, **options)
        except OtherData:
            assert self.past is not None
            self.past.is_distrusted = True
            raise
        finally:
            schedule.scale_grads, self._is_running = divides, False
        if losses is not None and own is not None:
            losses[:] = [loss.detach() / self._scale for loss in own]
        self._add_count(count, before)
        return output

    def _add_count(self, count: float | Tensor | None, losses_before: int) -> None:
        if self.losses == losses_before:
            if count is not None:
                raise ValueError(
                    "step.run: count was given on a rank that has computed no loss: give it where the last stage is"
                )
        elif losses_before and (count is None) != (self.count is None):
            raise ValueError("step.run: count was given in some runs of this step; give it in all, or in none")
        elif count is not None:
            self.count = (0.0 if self.count is None else self.count) + detached(count)

    def micro_batches(self, n: int) -> Iterator[PipelineMicroBatch]:
        """The n parts of a step whose gradients are accumulated: a run of the schedule for each.

            for part in step.micro_batches(4):
                part.run(schedule, part.of(inputs))

        All ranks need the same n: stages exchange in each run.

        Raises:
            ValueError: n is below 1.
        """
        checked("n", n, int, least=1)
        return (PipelineMicroBatch(self, number, n) for number in range(n))

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Sums the gradients over the ranks of this stage, in place of averaging them. Collective among these.

        A parameter without a gradient on all of them is left without.

        Args:
            group: of torch, the ranks of this stage.

        Raises:
            ValueError: it has another size. RuntimeError: of torch, a peer is gone.
        """
        self._has_ended = True
        found = dist.get_world_size(group) if group is not None or self._peers > 1 else 1
        if found != self._peers:
            raise ValueError(f"step.reduce: expected the group of the stage's {self._peers} ranks, got one of {found}")
        was_taken = self.past is not None and self.past.is_taken  # then by all of them, and no gradients are left
        if self._peers > 1 and self._is_repeated and not was_taken:
            sum_again(self._parameters, group, is_summed=self.past is not None and self.past.is_reduced)
        elif self._peers > 1 and not was_taken:
            sum_over(self._parameters, group)
        self._is_reduced = True
        if self.past is not None:
            self.past.is_reduced = True

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses: the schedule runs the backward.

        Raises:
            UnsupportedState: always.
        """
        raise UnsupportedState(
            "step.backward: a pipeline's schedule runs the backward passes of its microbatches itself. Give the "
            "schedule loss_fn=session.loss_function(...) and call step.run(schedule, ..., count=...)"
        )

    def __enter__(self) -> PipelineStep:
        self.is_open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and not self.committed:
            self._commit()
        self.is_open = False

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
        if not self._is_running:
            raise UnsupportedState(
                "a loss of session.loss_function was computed outside of step.run: call step.run(schedule, ...) in "
                "place of schedule.step(...), which would divide the gradients once more"
            )
        loss = self._loss(compute, output, target)
        self.losses += 1
        self.loss = loss.value if self.loss is None else self.loss + loss.value
        return loss.scaled

    def _loss(self, compute: LossFunction, output: Any, target: Any) -> Loss:
        known = {} if self.past is None else self.past.losses
        place = self.runs - 1, self.losses - self._losses_before
        digest = digest_of(() if self.past is None else target)
        if place in known:
            compare(digest, known[place].digest, f"step {self.number}: the target of microbatch {place[1]}")
            return known[place]
        loss = compute(output, target)
        check_loss(loss, "loss_function")
        known[place] = Loss(loss.detach(), loss if self._scale == 1 else loss * self._scale, digest)
        return known[place]

    def _draw(self, run: int, stage: int, microbatch: int) -> None:
        """Seeds the random numbers of a microbatch, so that it can be computed anew alone."""
        seed_all(*self._seeds, self.number, run, stage, microbatch)

    def end(self) -> None:
        """The script has computed all gradients.

        Raises:
            UnsupportedState: they were not summed over the stage's ranks.
        """
        self.is_open, self._has_ended = False, True
        if self.runs and self._peers > 1 and not self._is_reduced:
            raise UnsupportedState(
                f"step.reduce(group) was not called, but a stage has {self._peers} data-parallel ranks: call it after "
                "the last step.run, with the group of the stage's ranks, in place of averaging the gradients"
            )

    def attempt(self) -> dict[str, Any]:
        """What this rank has begun of the step."""
        return {
            "step": self.number,
            "generation": self._generation,
            "runs": self.runs,
            "has_ended": self._has_ended,
        }


def refuse_unequal_runs(mine: PipelineStep | None, group: Group) -> None:
    """Compares what all ranks had begun when they were interrupted; collective.

    One that ended its step after fewer runs than another has begun would never have met it.

    Raises:
        UnequalForwards: names the ranks, and what they have run.
    """
    found = gather_json(group, None if mine is None else mine.attempt())
    by_rank = [(rank, attempt) for rank, attempt in enumerate(found) if attempt is not None]
    for (rank, ended), (other, more) in itertools.permutations(by_rank, 2):
        is_same = all(ended[name] == more[name] for name in ("step", "generation"))
        if is_same and ended["has_ended"] and more["runs"] > ended["runs"]:
            raise UnequalForwards(
                f"step {ended['step']}: rank {other} of the pipeline ran {more['runs']} schedules, rank {rank} ran "
                f"{ended['runs']}. Stages exchange in each run, so all ranks must run as many in each step: "
                "`for part in step.micro_batches(n)` with the same n"
            )
