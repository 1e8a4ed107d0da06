"""The loop of a pipeline's session: one attempt at a step after the other, and what happens between two of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from evermoe.comm.torch_groups import end_torch_groups
from evermoe.errors import JobFinished, PeerLost
from evermoe.events.step_events import Protocol
from evermoe.pipeline.pipeline_driver import PipelineDriver
from evermoe.pipeline.pipeline_recovery import PipelineContext
from evermoe.pipeline.pipeline_step import PipelineStep
from evermoe.session.preemption import PreemptionHandler
from evermoe.session.protocol import CommitProtocol

logger = logging.getLogger(__name__)


class PipelineLoop:
    """Yields attempts at steps, makes torch's groups for them, and absorbs the failures that a lost rank explains.

    Args:
        parts: of the session.
        driver: carries out the protocol's commands.
        build_schedule: makes the schedule once torch's groups are connected.
        leave: asks to leave the job after the step.
    """

    def __init__(
        self,
        parts: PipelineContext,
        driver: PipelineDriver,
        build_schedule: Callable[[], Any],
        leave: Callable[[], None],
    ) -> None:
        self._state, self._driver, self._membership = parts.state, driver, parts.membership
        self._connections, self._group = driver.connections, parts.membership.trainer_group
        self._build_schedule = build_schedule
        self.protocol = CommitProtocol(
            driver,
            parts.membership,
            members=parts.config.size,
            is_fixed=True,
            generation=parts.store.newest_generation(),
            on_record=lambda said, commands: parts.emit(Protocol(said, commands)),
        )
        self.schedule: Any = None
        """Schedule of the connected groups; None while there are none."""
        self.current: PipelineStep | None = None
        """The latest attempt at a step."""
        self.has_left = False
        """Whether this rank has left its job."""
        limit = parts.config.membership.drain_timeout
        self._preemption = PreemptionHandler(leave, limit, driver)

    def steps(self, until: int) -> Iterator[PipelineStep]:
        """Yield the steps; see `PipelineSession.steps`."""
        try:
            with self._preemption.expected():
                yield from self._steps(until)
            if not self.protocol.has_left:
                self.close()
        except JobFinished:
            self.close()
            logger.warning(
                "the job ended without this process, whose model is at step %d: it ends here", self.protocol.step
            )
            raise SystemExit(0) from None
        except BaseException as failure:  # GeneratorExit, too: the caller left the loop
            self._give_up(failure)
            raise
        if self.protocol.has_left:
            self._leave()
            self._preemption.obey()

    def _steps(self, until: int) -> Iterator[PipelineStep]:
        if self.has_left:
            raise RuntimeError(
                "this session has left its job: its steps are done, or its loop was left. Make a new session to resume."
            )
        self._membership.requests.steps = until
        while not self.protocol.has_left:
            if self._group.broken is not None or not self._driver.history.reports:
                self._end_attempt()
            stopped = self._driver.stopped
            self.protocol.look(until if stopped is None else min(until, stopped))
            if self.protocol.is_over:
                break
            if self.protocol.is_stepping and not self._driver.moves_experts() and self._connect():
                step = self.current = self.new_step()
                yield step
                if not step.was_entered:
                    raise RuntimeError("each step of session.steps() must be used as `with step:`")

    def new_step(self) -> PipelineStep:
        """Return an attempt at the step that is next."""
        parameters, _ = self._state.parameters()
        number, generation = self.protocol.step, self._membership.generation
        return PipelineStep(number, self.schedule, parameters, self._connections, generation, self)

    def _connect(self) -> bool:
        """Make torch's groups and the schedule if there are none. Return False if a rank was lost meanwhile."""
        if self.schedule is not None:
            return True
        try:
            with self._connections.connected():
                self.schedule = self._build_schedule()
                _check_schedule(self.schedule)
        except Exception as error:
            self.schedule = None
            if not self._connections.is_connection_loss(error):
                raise
            self._group.drop(f"torch's groups were not made: {error}")  # which the others notice at once
            return False
        return True

    def _end_attempt(self) -> None:
        """End torch's groups and all transfers in them, before all ranks meet."""
        self.schedule = None
        end_torch_groups()
        log = self._driver.localised.log
        if self._connections.uses_nccl:  # the host ran ahead of kernels that may have ended with half of their work
            log.drop_unfinished()
        log.interrupt()
        self._driver.interrupt()

    def begin_step(self, step: PipelineStep) -> None:
        """Begin a step, whose block is entered."""
        if step is not self.current:
            raise RuntimeError(f"step {step.number} is over: use each step of session.steps() before the next one")
        self._driver.begin_step(step)

    def commit_step(self, step: PipelineStep) -> None:
        """Reduce, vote and update at the end of a step's block."""
        before = self._driver.taken
        try:
            ballot = self._driver.finish_step(step)
            self._driver.end_step()
            if self._driver.health.must_leave:
                self._preemption.evict()
            self.protocol.vote(ballot)
        finally:
            self._driver.end_vote()
        if self._driver.taken == before:
            raise PeerLost(f"step {step.number} was not taken: {self._group.broken}")
        step.committed = True
        self._driver.pace(self.protocol.step)

    def fail_step(self, step: PipelineStep, error: BaseException) -> bool:
        """Handle the failure of a step. Return whether a lost rank explains it; `steps` then recovers."""
        self._driver.guard.allow_step()
        self._driver.end_step()
        if self._connections.is_connection_loss(error):
            self._group.drop(str(error))
            return True
        self._give_up(error)
        return False

    def _give_up(self, failure: BaseException) -> None:
        """Leave the job, so that no rank waits for this one. Its memory stays for the next process."""
        self._group.drop(f"a rank failed: {type(failure).__name__}")
        self._leave()

    def close(self) -> None:
        """Leave the job and remove this rank's shared memory."""
        self._leave()
        self._driver.copies.store.close(self._membership.id)

    def _leave(self) -> None:
        if self.has_left:
            return
        self.has_left, self.schedule = True, None
        self._driver.end_copies()
        end_torch_groups()
        self._connections.leave()
        self._driver.guard.remove()
        self._driver.copies.close()
        self._membership.close()
        self._driver.health.close()
        self._driver.end()
        self._driver.run.leave()


def _check_schedule(schedule: Any) -> None:
    if not (hasattr(schedule, "scale_grads") and hasattr(schedule, "step")):
        raise ValueError(
            "expected build_schedule to return a schedule of torch.distributed.pipelining, got "
            f"{type(schedule).__name__}"
        )
