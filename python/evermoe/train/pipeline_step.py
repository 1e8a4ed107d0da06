"""One attempt at a step of a pipeline: schedules that run in it, their losses, and the sum of gradients over peers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.errors import UnequalForwards, UnsupportedState
from evermoe.options import checked
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
        divides, schedule.scale_grads = schedule.scale_grads, False  # the session divides, by what all ranks have
        self._is_running = True
        try:
            output = schedule.step(*inputs, losses=own, **options)
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
        for dtype in sorted({p.dtype for p in self._parameters}, key=str) if self._peers > 1 else ():
            _sum([p for p in self._parameters if p.dtype == dtype], group)
        self._is_reduced = True

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

    def weigh(self, loss: Tensor) -> Tensor:
        """A microbatch's loss, of which the schedule computes gradients.

        Raises:
            ValueError: it is no tensor of one number that depends on parameters.
            UnsupportedState: the schedule is not run by `step.run`.
        """
        if not self._is_running:
            raise UnsupportedState(
                "a loss of session.loss_function was computed outside of step.run: call step.run(schedule, ...) in "
                "place of schedule.step(...), which would divide the gradients once more"
            )
        check_loss(loss, "loss_function")
        self.losses += 1
        self.loss = loss.detach() if self.loss is None else self.loss + loss.detach()
        return loss if self._scale == 1 else loss * self._scale

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


def _sum(parameters: Sequence[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    """Adds up gradients of one type over a group; those that no rank has stay away."""
    marks = [torch.full((1,), float(p.grad is not None), dtype=p.dtype) for p in parameters]
    parts = [torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in parameters]
    flat = torch.cat([*parts, *marks])
    dist.all_reduce(flat, group=group)
    *sums, counts = flat.split([*(p.numel() for p in parameters), len(parameters)])
    for parameter, total, count in zip(parameters, sums, counts.tolist(), strict=True):
        if count and parameter.grad is None:
            parameter.grad = total.view_as(parameter).clone()
        elif count:
            parameter.grad.copy_(total.view_as(parameter))  # type: ignore[union-attr]


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
