"""Reduced gradients of a step: a script's changes of them, and their part of a member's ballot."""

from __future__ import annotations

from collections.abc import Callable

import torch

from evermoe.comm.group import Group
from evermoe.comm.vote import Ballot, cast
from evermoe.session import gradients
from evermoe.session.buckets import Buckets
from evermoe.session.islands import Place
from evermoe.session.session_config import SessionConfig
from evermoe.session.step import Step
from evermoe.session.step_gradients import StepGradients
from evermoe.session.training_inputs import TrainingInputs
from evermoe.state.training_state import TrainingState


class ReducedGradients:
    """Gradients of a step between their reduction and the vote.

    Args:
        script: whose model and optimizer they are of.
        state: the model's units.
        group: of the members that train.
        config: of the session.
        place: of this process in its island.
    """

    def __init__(
        self, script: TrainingInputs, state: TrainingState, group: Group, config: SessionConfig, place: Place
    ) -> None:
        self._place = place
        self._script, self._state, self._group, self._config = script, state, group, config

    def count(self, step: Step, buckets: Buckets, *, are_changed: bool = False) -> Ballot:
        """Read this member's part of the step's loss and of the gradients' squares.

        Args:
            step: whose loss it is.
            buckets: with the sums.
            are_changed: whether the gradients may differ from these sums.
        """
        assert step.loss is not None
        flats = None if are_changed else buckets.flats
        squares = gradients.SquareSum(self._state, self._group.rank, self._group.size, flats=flats)
        rank, scale = self._group.rank, self._script.loss_scale.value
        copies, loss, count = self._place.copies, step.loss, step.count
        if copies > 1:  # each of them has the same loss
            loss, count = loss / copies, None if count is None else count / copies
        ends = buckets.extremes if self._group.size > 1 else [squares.norms]  # of the same gradients
        mine = gradients.ballot_of(loss, count, ends, squares.norms, squares.value, rank, scale)
        share = step.share
        equal = copies * self._place.parts  # processes with the same share
        samples = (len(share.indices) if share.weight else 0) / equal
        return mine._replace(samples=samples, missing=share.missing / equal, remaining=float(share.remaining))

    def change(self, on_gradients: Callable[[StepGradients], object], step: Step, buckets: Buckets) -> Ballot:
        """Divide the reduced gradients and let the script change them, unless the step cannot count; collective.

        Args:
            on_gradients: the script's function.
            step: whose gradients they are.
            buckets: as of `count`.

        Returns:
            The result of `count` before the change, and whether they were divided.
        """
        mine = self.count(step, buckets)
        sums, _ = cast(self._group, mine)
        if sums.is_mixed or not sums.is_finite:
            return mine  # the vote refuses the step, or all leave it out
        gradients.multiply(self._state, 1 / sums.divisor)
        found = StepGradients(step.number, self._config.seed or 0, self._script.model, self._state, self._group)
        with torch.no_grad():
            on_gradients(found)
        return mine._replace(divided=1.0)
