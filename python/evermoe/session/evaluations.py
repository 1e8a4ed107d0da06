"""Evaluations between two steps, which a loss repeats without counting one twice.

Some members may notice a loss in an evaluation that others have finished. Those cannot run it again, as their scripts
have continued. So in the next recovery all gather how many evaluations each has finished after this step. A member that
is behind adopts the result. If nobody has finished, all members that were in the evaluation run it again, within the
recovery. A member that has joined in that recovery has no evaluation to run: it serves the experts of others until
they begin the next step, and takes part when they gather the complete model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from evermoe.checkpoint import full_state
from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.errors import PeerLost, PersistFailed, UnequalForwards, UnsupportedState
from evermoe.moe.experts import expert_layers
from evermoe.moe.forward_turns import Turns
from evermoe.session.purposes import UNLIMITED, Meeting, Purpose
from evermoe.session.substitute_weights import SubstituteWeights

logger = logging.getLogger(__name__)

WRONG_RESULTS = (
    "a member was lost in session.evaluation(), whose block ran to its end: its results are wrong. session.repeated() "
    "repeats an evaluation after a loss"
)
Work = Callable[[int, int], Any]
"""Computes a part of an evaluation, from the number of this member among those that evaluate, and their number."""
Combine = Callable[[list[Any]], Any]
"""Combines the parts, in the order of ranks, to the result."""


class _Progress(NamedTuple):
    """Evaluations after a step, the same on all members that begin one: those that join take that of the others."""

    step: int = -1
    """Steps that were taken when the latest evaluation began."""
    finished: int = 0
    """Evaluations that were finished after that step."""
    result: str = ""
    """Result of the latest finished one as JSON, for members that have not finished it."""

    def at(self, step: int) -> _Progress:
        """Return the progress with which an evaluation after a step begins."""
        return self if step == self.step else _Progress(step)

    def finish(self, result: str) -> _Progress:
        """Return the progress after one more evaluation."""
        return _Progress(self.step, self.finished + 1, result)


class Evaluations:
    """Collective work of the members that train between two steps.

    Args:
        model: with the layers that exchange tokens.
        group: the members that train.
        node: of this member, for people.
        meeting: where members meet.
        substitute: weights that evaluations may use in place of the trained ones.
    """

    def __init__(
        self, model: nn.Module, group: Group, node: str, meeting: Meeting, substitute: SubstituteWeights
    ) -> None:
        self.substitute = substitute
        self._model, self._group, self._node, self._meeting = model, group, node, meeting
        self._layers = list(expert_layers(model).values())
        self._turns = Turns(self._layers, group)
        self._is_open = False
        """Whether this member is in an evaluation now."""
        self._work: tuple[Work, Combine] | None = None
        """The evaluation that this member has to finish, repeated after a loss."""
        self._progress = _Progress()
        self._found = ""
        """Result of the latest finished evaluation as JSON, for this member's script."""
        self._trains_in: tuple[int, int] | None = None
        """Generation of the group in which this member trains, and its size."""
        self._inside: list[int] = []
        """Ranks that were in an evaluation when the latest recovery began, until these begin a step."""
        self._was_cut = False
        """Whether a loss has ended a block of this member's since the latest recovery."""
        self.stopped: int | None = None
        """Steps after which all members end the job; None for the number of the script."""

    # ---- what scripts do

    @contextmanager
    def block(self) -> Iterator[None]:
        """Run an evaluation. A loss ends it early, without an exception; with `finishes_steps` it only warns."""
        if self._is_open:
            yield
            return
        try:
            with self._evaluating():
                try:
                    self._begin()
                except PeerLost as lost:  # the script's first forward finds the group broken
                    self._group.drop(str(lost))
                yield
                if self._group.gives_zeros:
                    self._was_cut = True
                    logger.warning(WRONG_RESULTS)
                if self._group.broken is None:
                    self._turns.serve_all()
                    gather_json(self._group, None)
        except PeerLost as lost:
            self._was_cut = True
            self._group.drop(str(lost))

    def run(self, step: int, work: Work, combine: Combine, recover: Callable[[], None]) -> Any:
        """Run an evaluation on all members, again after a loss.

        Args:
            step: steps that are taken.
            work: returns what JSON carries.
            combine: makes the result of what `work` has returned on each of the members that evaluate.
            recover: goes through a recovery, which calls `agree` and `resume`.

        Returns:
            The result, the same on all members, as JSON carries it.

        Raises:
            RuntimeError: this member is in an evaluation already.
        """
        if self._is_open:
            raise RuntimeError("an evaluation cannot be repeated by itself inside another one: call it after that")
        self._progress = self._progress.at(step)
        self._work = work, combine
        try:
            with suppress(PeerLost):
                self._attempt()
            while self._work is not None or not self._meeting.start.begin():
                recover()
        finally:
            self._work = None
        return json.loads(self._found)

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Wait for each other without a limit at the end of the block; yields whether this is rank 0."""
        try:
            self._meeting.meet(Purpose.ALONE)
        except PeerLost as lost:
            self._group.drop(str(lost))
        try:
            yield self._group.rank == 0
        except BaseException as error:
            is_lost = isinstance(error, PeerLost) and self._group.broken is not None
            self._group.drop("a member failed in session.alone()")
            if not is_lost:
                raise
        if self._group.broken is None:
            try:
                self._meeting.meet(Purpose.ALONE, UNLIMITED)
            except PeerLost as lost:
                self._group.drop(str(lost))

    def come_together(self, folder: str | None = None, *, gathers: bool = False, exports: bool = False) -> int:
        """In an evaluation, serve others until all have come to the same point of their scripts; collective.

        Args:
            folder: for the complete model, or None if it goes to memory.
            gathers: whether they gather the complete model next, in which a member that follows takes part.
            exports: whether they export it as `full_state.follow_export` says.

        Returns:
            The rank that gets an export: the first of those whose scripts take part.

        Raises:
            UnequalForwards: a member that has joined meanwhile cannot take part; raised on all others.
        """
        if not self._is_open or self._group.size == 1 or not self._turns.meet():
            return 0
        can_follow = exports or (gathers and (0 in self._inside or folder is not None))
        gather_json(self._group, {"folder": folder, "can_follow": can_follow, "exports": exports})
        if not can_follow:
            raise UnequalForwards(
                "a worker has joined during this evaluation, and cannot take part in what needs all members at once: "
                "then only export() and full_state_dict() work, the latter without a folder only if rank 0 was in the "
                "evaluation. Catch this error outside of repeated(), and repeat the work after the next step"
            )
        return self._inside[0]

    def _follow_together(self) -> None:
        """Take part, as a member that follows, in the work for which others have come together."""
        plan = gather_json(self._group, None)[self._inside[0]]
        if not plan["can_follow"]:
            raise PeerLost("others need all members at once in an evaluation which this one has not begun")
        with suppress(PersistFailed, UnsupportedState):  # the same on all: scripts may continue after it
            if plan["exports"]:
                full_state.follow_export(self._model, self._group, self._inside[0])
            elif plan["folder"] is None:
                full_state.gather(self._model, self._group)
            else:
                full_state.write(full_state.pieces(self._model), Path(plan["folder"]), self._group)

    @property
    def others_continue(self) -> bool:
        """Whether `agree_to_stop` has found that other members have begun the next step."""
        return self._meeting.is_elsewhere

    def agree_to_stop(self) -> bool:
        """Return whether all members have asked to stop at this step; where some have not, the group is dropped."""
        if self._group.broken is not None or not self._meeting.meet_unless_elsewhere(Purpose.STOP):
            return False
        self._inside = []
        return True

    def release(self) -> None:
        """Begin the next step on this member and on those that have waited for its evaluations."""
        if self._inside and self._group.broken is None:
            try:
                self._meeting.meet(Purpose.STEP)
            except PeerLost as lost:
                self._group.drop(str(lost))
            self._progress = _Progress()
        self._inside = []

    def check_goes_on(self, step: int) -> None:
        """Check that the job continues with a step.

        Raises:
            PeerLost: it was stopped before this member joined it. The group is dropped: all agree again, to end it.
        """
        if self.stopped is not None and step >= self.stopped:
            self._group.drop("the job is stopped")
            raise PeerLost("the job is stopped")

    def step_taken(self) -> None:
        """Forget the latest result, as a step was taken."""
        self._progress = self._progress._replace(result="")

    # ---- a recovery

    def agree(self, everyone: Group, *, trains: bool, gave_up: bool) -> None:
        """Gather who was in an evaluation and who has finished it; collective.

        Args:
            everyone: all members.
            trains: whether this member trains.
            gave_up: whether it has waited for others until the time limit.

        Raises:
            UnequalForwards: a member has not come to an evaluation in which others waited for it.
        """
        found = gather_json(everyone, self._report(gave_up) if trains else {"stopped": self.stopped})
        trainers = [each for each in found if "step" in each]
        _refuse_absent(trainers)
        stops = [each["stopped"] for each in found if each["stopped"] is not None]
        self.stopped = min(stops, default=None)
        self._inside = [each["rank"] for each in trainers if each["is_pending"]]
        self.substitute.name = next((each["weights"] for each in trainers if each["weights"] is not None), None)
        done = [] if self._work is None else _done(self._report(gave_up), trainers)
        if done:
            self._work, self._found = None, done[0]["result"]
        if trains and self._work is None:
            pending = [each for each in trainers if each["is_pending"] and not _done(each, trainers)]
            latest = max(pending or trainers, key=lambda each: (each["step"], each["finished"]))
            self._progress = _Progress(latest["step"], latest["finished"], latest["result"])

    def _report(self, gave_up: bool) -> dict[str, Any]:
        return {
            "rank": self._group.rank,
            "node": self._node,
            "trains_in": self._trains_in,
            "purpose": self._meeting.purpose,
            "gave_up": gave_up,
            "is_pending": self._work is not None,
            "was_cut": self._was_cut,
            "stopped": self.stopped,
            "weights": self.substitute.name,
            **self._progress._asdict(),
        }

    def resume(self, generation: int, step: int) -> None:
        """Finish, after a recovery, the evaluation that a loss has interrupted; serve that of others. Collective.

        Raises:
            PeerLost: another member is gone.
        """
        self._trains_in = generation, self._group.size
        self._meeting.purpose, self._was_cut = None, False
        self.substitute.use_again()
        if self._group.rank not in self._inside:
            while self._inside:
                self._follow(step)
        elif self._work is not None:
            self._attempt()

    def _follow(self, step: int) -> None:
        purpose = self._meeting.meet(Purpose.NONE, UNLIMITED)
        if purpose is Purpose.EVALUATION:
            with self._evaluating():
                self._turns.begin()
                while self._turns.follow():
                    self._follow_together()
                gather_json(self._group, None)
        elif purpose is Purpose.ALONE:
            self._meeting.meet(Purpose.NONE, UNLIMITED)
        else:
            self._inside, self._progress = [], _Progress()
            self.stopped = step if purpose is Purpose.STOP else self.stopped

    # ---- one attempt

    def _attempt(self) -> None:
        assert self._work is not None
        work, combine = self._work
        ranks, rank, island = self._inside or list(range(self._group.size)), self._group.rank, self._meeting.start.width
        try:
            with self._evaluating():
                self._begin()
                mine = work(ranks.index(rank) // island, len(ranks) // island)
                self._turns.serve_all()
                parts = gather_json(self._group, {"part": mine} if self._meeting.is_counted else None)
        except PeerLost as lost:
            self._group.drop(str(lost))
            raise
        self._found = json.dumps(combine([each["part"] for each in parts if each is not None]))
        self._work, self._progress = None, self._progress.finish(self._found)

    def _begin(self) -> None:
        self._meeting.begin_evaluation()
        if self._group.size > 1:
            self._turns.begin()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Run a block in evaluation mode, without gradients. An error drops the group, so that nobody waits."""
        modes = {module: module.training for module in self._model.modules()}
        self._model.eval()
        for layer in self._layers:
            layer.has_samples = True  # whichever part of the latest step this member had
        self._is_open = True
        try:
            with torch.no_grad():
                yield
        except BaseException as error:
            what = str(error) if isinstance(error, PeerLost) else type(error).__name__
            self._group.drop(f"an evaluation failed: {what}")
            raise
        finally:
            self._is_open = False
            self._turns.end()
            for module, training in modes.items():
                module.training = training


def _done(mine: dict[str, Any], found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the reports of members that have finished the evaluation which this member has to finish."""
    return [each for each in found if each["step"] == mine["step"] and each["finished"] > mine["finished"]]


def _refuse_absent(found: list[dict[str, Any]]) -> None:
    for waiting in found:
        together = [each for each in found if each["trains_in"] == waiting["trains_in"]]
        if waiting["purpose"] not in (Purpose.EVALUATION, Purpose.ALONE) or len(together) < waiting["trains_in"][1]:
            continue  # others may have waited for a member that is gone
        for other in together:
            is_inside = other["purpose"] is not None or other["is_pending"] or other["was_cut"]
            gave_up = waiting["gave_up"] or other["gave_up"]  # both wait, and one of them gives up first
            if gave_up and not is_inside:
                what = "session.alone()" if waiting["purpose"] == Purpose.ALONE else "an evaluation"
                raise UnequalForwards(
                    f"rank {other['rank']} on {other['node']} did not come to {what} in which rank {waiting['rank']} "
                    f"on {waiting['node']} waited for it for hang_timeout: evaluation(), evaluate(), repeated(), "
                    "full_state_dict() and alone() are for all members that train, in the same order. Leave out an "
                    "`if` around them that differs between members"
                )
