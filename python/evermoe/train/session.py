"""The elastic session: an ordinary training loop that survives the death of its peers.

    vote before update:   forward, backward → reduce → send → VOTE → update

The commit protocol (`train.protocol`) decides what a member does; `train.session_driver` does it. A script sees steps.
Each is one attempt: a step that a failure interrupts is repeated with the same data.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from evermoe.comm.courier import Sent
from evermoe.comm.group import Group
from evermoe.comm.lighthouse import start_local_lighthouse
from evermoe.comm.membership import MembershipManager
from evermoe.comm.messages import Identity
from evermoe.errors import JobFinished, PeerLost
from evermoe.events import Listener, Protocol, Recovered
from evermoe.memory_folder import DEFAULT, job_folder, node_name
from evermoe.observe import combined, from_environment
from evermoe.options import check_known
from evermoe.planning.windows import Windows
from evermoe.protection import Protection
from evermoe.replay.replicas import find_arithmetic
from evermoe.sampler import Sampler
from evermoe.snapshot.store import SnapshotStore
from evermoe.state.deferred import Deferral, Initializer, WeightSource, find_deferral
from evermoe.state.training_state import TrainingState
from evermoe.train.between_steps import BetweenSteps, check_open
from evermoe.train.loss_scale import LossScale
from evermoe.train.preemption import PreemptionHandler
from evermoe.train.protocol import CommitProtocol
from evermoe.train.session_config import SessionConfig, with_environment
from evermoe.train.session_driver import SessionDriver
from evermoe.train.session_recovery import SessionContext
from evermoe.train.step import Step
from evermoe.train.training_inputs import TrainingInputs

logger = logging.getLogger(__name__)

_ended: set[str] = set()
"""Lighthouses whose job has ended in this process."""


class Session(BetweenSteps):
    """Trains `model` with all members that are alive. See the module's head for what a step does.

        session = evermoe.Session(model, optimizer, evermoe.ElasticSampler(len(data), batch_size=64))
        for step in session.steps(1000):
            with step as indices:
                step.backward(model.loss(data[indices]))

    Args:
        model: any module on one device; its `evermoe.MoE` layers are spread over the members. The rest is
            replicated; the optimizer's state of it as well, or on one member each (`dense="sharded"`).
        optimizer: elementwise, over the model's parameters (torch.optim.AdamW with fused=True is a good choice).
        sampler: divides the global batches: an `ElasticSampler` or `ElasticLoader`, or one of yours.
        scheduler: stepped by the session after each update, `ReduceLROnPlateau` with the step's loss.
        scaler: its settings scale the losses of training in float16. The session scales, scales back and updates.
        on_event: called with each event, a dataclass of `evermoe.events`: a function, or several (`evermoe.observe` has
            some). It must not block or raise. `ChunkSent`, `SnapshotReceived`, `GradientsLogged` and `Damaged` come
            from other threads.
        weights: of a model built in `evermoe.deferred`, where its first weights come from: an `evermoe.WeightSource`,
            or what initialises a module. None: what its constructors do.
        device: where such a model is made; None for the device given to `deferred`.
        options: fields of `SessionConfig`.

    Raises:
        ValueError: an option is wrong, or another job runs in checkpoint_dir. UnsupportedState: the optimizer's state
            cannot be divided into units, or a part of the model is deferred and another is not. OSError: checkpoint_dir
            cannot be written to. TooFewFiles: this process may not open as many connections as `members` need.
            RuntimeError: a job of the same Lighthouse has ended in this process.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: Sampler,
        *,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
        on_event: Listener | Sequence[Listener] = (),
        weights: WeightSource | Initializer | None = None,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        check_known(options, SessionConfig.names())
        emit = combined(on_event, from_environment())
        self.config = with_environment(SessionConfig(**options))
        if self.config.lighthouse is not None:
            _check_is_first(self.config.lighthouse)
        self.model, self.optimizer, self.sampler, self.scheduler = model, optimizer, sampler, scheduler
        self.has_left = True
        """Whether the session has left its job, or has not begun."""
        self._until = 0
        script = TrainingInputs(model, optimizer, sampler, scheduler, LossScale(scaler), self.config.stateful or {})
        script.check(trains=self.config.role == "train")
        script.claim(self)
        deferral = find_deferral(model, optimizer, weights, device)
        is_sharded = self.config.dense == "sharded"
        marks = self.config.choices.may_lose_tokens
        self._state = TrainingState(model, optimizer, deferral=deferral, is_sharded=is_sharded, has_marks=marks)
        arithmetic = find_arithmetic(optimizer) if self.config.sends_gradients else None
        job = self.config.job or f"job-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        node, folder = node_name(self.config.node), job_folder(self.config.memory_dir or DEFAULT, job)
        self._store = SnapshotStore(folder / node, self._state, self.config.preset)
        self._store.check()
        for layer in self._state.layers.values():
            layer.split_as(self.config.choices.token_split)
        common = self.config.shared() | script.common() | {"first weights": _describe(deferral)}
        rounding = arithmetic.variant if arithmetic else "none" if self.config.sends_gradients else ""
        self._lighthouse, lighthouse = _find_lighthouse(self.config.lighthouse)
        self._membership = MembershipManager(
            self.config,
            lighthouse=lighthouse,
            identity=Identity(job, self._state.catalog.layout, common, rounding),
            node=node,
            device=(on := next(model.parameters()).device),
            has_side_group=is_sharded and on.type == "cpu",
        )
        self.group = self._membership.trainer_group
        """The members that train: its `rank` and `size` change with them."""
        for layer in self._state.layers.values():
            layer.group = self.group
        self._protection = Protection(self._state, self._store, self._membership, self.config, arithmetic, emit)
        parts = SessionContext(script, self._state, self._membership, self._protection, self.config, emit)
        self._driver = SessionDriver(parts, self._store.directory.parent, self.leave)
        self._protocol = CommitProtocol(
            self._driver,
            self._membership,
            members=self.config.members or 1,
            join_interval=self.config.join_interval,
            join_wait=self.config.join_wait,
            rebalance_interval=self.config.rebalance_interval,
            generation=max(self._store.newest_generation(), self._driver.saved_generation()),
            on_record=lambda said, commands: emit(Protocol(said, commands)),
        )
        self._preemption = PreemptionHandler(self.leave, self.config.drain_timeout, lambda: bool(self._driver.reports))
        self.has_left = False

    @property
    def version(self) -> int:
        """Version of the state: see `evermoe.state.version`."""
        return self._protocol.version

    @property
    def loss(self) -> float:
        """Mean loss of the latest step's global batch, also right after a resume; NaN before the first step."""
        return self._driver.loss

    @property
    def grad_norm(self) -> float:
        """Norm of the latest step's gradient over all parameters, before changes and clipping; NaN before a step."""
        return self._driver.grad_norm

    @property
    def skipped(self) -> int:
        """Steps whose update all members have left out, since this process began; see `on_nonfinite`."""
        return self._driver.skipped

    @property
    def copied_step(self) -> int:
        """Steps that no failure which the preset covers can undo; -1 before the first copies."""
        return self._driver.committed if self.config.copies else -1

    @property
    def reports(self) -> list[Recovered]:
        """Recoveries so far, as this member saw them."""
        return self._driver.reports

    @property
    def generation(self) -> int:
        """Number of the membership: it grows when members change."""
        return self._membership.generation

    @property
    def windows(self) -> Windows | None:
        """Idle windows of this member's network, as the latest profiled steps had them; None before those."""
        return self._protection.window_planner.windows

    def sent(self) -> list[Sent]:
        """Return the latest transfers of copies, for `Profiler.write_trace`."""
        return self._protection.sent()

    # ---- the loop

    def steps(self, until: int) -> Iterator[Step]:
        """Yield steps until `until` are taken, and again the one that a failure interrupted.

        On a replica node it yields nothing: it keeps the copies that others send, and returns when they are done. It
        returns earlier after `leave`. SIGTERM also ends the process then (code 143), as SIGUSR1 and SIGUSR2 do (75),
        and the end of a job that did not need this spare (0). `evermoe role` has it run its program again.

        Raises:
            SystemExit: the job ended without this member, it has left on a signal, or was a spare that nobody needed.
            FolderInUse: living processes of another run of the job use its memory folder or checkpoint_dir.
            LostExperts: more copies were lost than are kept, and no checkpoint is left. JoinTimeout: no Lighthouse, or
            too few members. LeftBehind: the others continued without this member, and none of them is left.
            NonFiniteLoss: a loss or a gradient is infinite or not a number; raised on all members, replica nodes too.
            PersistFailed: all steps are taken, and the last checkpoint could not be written.
        """
        try:
            with self._preemption.expected():
                yield from self._steps(until)
            if not self._protocol.has_left:
                self.close()
                _ended.update(filter(None, [self.config.lighthouse]))
        except JobFinished:
            _end_too_late(self)
        except BaseException as failure:  # GeneratorExit, too: the caller left the loop
            self._fail(failure)
            raise
        if self._protocol.has_left:
            _leave_job(self)
            self._preemption.obey()
            self._driver.role_request.obey()

    def _steps(self, until: int) -> Iterator[Step]:
        is_first = True
        while not self._protocol.has_left:
            check_open(self)
            self._membership.steps = self._until = until
            self._stop_if_asked()
            self._driver.evaluations.release()
            self._driver.substitute.put_back()
            self._protocol.look(self._end_of(until))
            if self._protocol.is_over:
                if is_first and self.is_main:
                    logger.warning("nothing left to do: %d of %d steps are taken", self.step, until)
                break
            is_first = False
            if self._protocol.is_stepping:
                share = self.sampler.share(self.group.rank, self.group.size)
                step = Step(self.step, self.generation, share, self._driver, self._commit, self._fail, self.group.drop)
                yield step
                if not step.is_entered and not self._driver.is_stale(step):
                    self._check_stops()

    def leave(self) -> None:
        """Leave the job after the step that is under way: the loop of `steps` ends, and the others continue without it.

        The others repeat no step. State without a copy on them is written to a checkpoint first, if there is a
        checkpoint_dir. No-op in the last step. Any thread may call it, and a signal handler.
        """
        self._driver.lost.is_leaving = True
        self._protocol.leave()

    def _commit(self, step: Step) -> bool:
        """Reduce, vote and update at the end of a step. Return whether it was taken."""
        before = self._driver.taken
        try:
            ballot = self._driver.finish_step(step)
        except PeerLost as lost:
            self._protocol.lose(str(lost))
            return False
        self._protocol.vote(ballot)
        is_taken = self._driver.taken > before
        if is_taken:
            self._driver.checkpoint_if_due(self.version)
        return is_taken

    def _fail(self, failure: BaseException | None) -> None:
        """Leave the job after an error, so that no member waits; the memory stays for the next process."""
        self.group.drop(f"a member failed: {type(failure).__name__}")
        _leave_job(self)

    def write_trace(self, path: str | Path) -> None:
        """Write a trace for Perfetto of this member's latest profiled steps, windows and copies.

        Raises:
            ValueError: no step was profiled yet.
        """
        self._protection.write_trace(path)

    def close(self) -> None:
        """Leave the job and remove this member's shared memory.

        `steps` does this when all steps are done. A loop that is left early, by `break` or an error, only leaves the
        job: its memory stays for the processes that resume with it, until this is called.
        """
        self._leave()
        self._store.close(self._membership.id)

    def _leave(self) -> None:
        if not self.has_left:
            self.has_left = True
            self._driver.guard.remove()
            self._membership.close()
            self._protection.close()
            self._driver.leave()
            if self.group.size == 1:  # this member has all experts: the model works without a session
                for layer in self._state.layers.values():
                    layer.group = Group()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
            self._lighthouse = None


def _find_lighthouse(given: str | None) -> tuple[Any, str]:
    """Return the Lighthouse of this process, if none was given, and the address of the job's Lighthouse."""
    return start_local_lighthouse(heartbeat_timeout=1, join_timeout=5) if given is None else (None, given)


def _describe(deferral: Deferral | None) -> str:
    return deferral.describe() if deferral is not None else "the model's own"


def _leave_job(session: Session) -> None:
    """Leave the job. Its memory stays for processes that resume it, if the job has a name."""
    if session.config.job is None:
        session.close()
    else:
        session._leave()


def _end_too_late(session: Session) -> NoReturn:
    """Close the session of a worker whose job is over, and end its process: its script has no trained model.

    Raises:
        SystemExit: always.
    """
    session.close()
    if session.config.spare:
        logger.warning("the job is over, and this spare was not needed")
    else:
        logger.warning(
            "the job ended without this worker, whose model is at step %d: its process ends here, so that its script "
            "does not use that model",
            session.step,
        )
    raise SystemExit(0)


def _check_is_first(lighthouse: str) -> None:
    """Check that no job of this Lighthouse has ended in this process.

    Raises:
        RuntimeError: one has.
    """
    if lighthouse in _ended:
        raise RuntimeError(
            f"a job of the Lighthouse {lighthouse} has ended in this process, and its other workers may still be in "
            "it, or be started again: under a Lighthouse (evermoe run, torchrun, srun) a script has one session. Give "
            "the second training a script and a start of its own"
        )
