"""The elastic session: an ordinary training loop that survives the death of its peers.

    vote before update:   forward, backward → reduce → send → VOTE → update

The commit protocol (`evermoe.session.protocol`) decides what a member does; `evermoe.session.session_driver` does it. A
script sees steps. Each is one attempt: a step that a failure interrupts is repeated with the same data.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.lr_scheduler import LRScheduler

from evermoe.comm.courier import Sent
from evermoe.comm.group import Group
from evermoe.comm.lighthouse import start_local_lighthouse
from evermoe.comm.membership import MembershipManager
from evermoe.comm.messages import Identity
from evermoe.comm.torch_groups import is_group_error
from evermoe.config.checkpoints import Checkpoints
from evermoe.config.membership import Membership
from evermoe.config.placement import Placement
from evermoe.config.variables import find_membership
from evermoe.copies.protection import Protection
from evermoe.copies.replay.replayable import find_arithmetics
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.data.reader_states import states_of
from evermoe.data.sampler import Sampler
from evermoe.errors import IslandLost, JobFinished, PeerLost
from evermoe.events.base_event import Listener
from evermoe.events.step_events import Protocol
from evermoe.observe.listeners import combined, from_environment
from evermoe.optim.combined import as_one, each_of
from evermoe.planning.presets import PresetName
from evermoe.planning.windows import Windows
from evermoe.presets import PresetOptions
from evermoe.process.memory_folder import DEFAULT, job_folder, node_name
from evermoe.session import ended_jobs, proportions
from evermoe.session.between_steps import BetweenSteps, check_open
from evermoe.session.buckets import needs_background
from evermoe.session.islands import LOST, divide, find_island, find_place
from evermoe.session.loader_watch import LoaderWatch
from evermoe.session.loss_scale import LossScale
from evermoe.session.preemption import PreemptionHandler
from evermoe.session.protocol import CommitProtocol
from evermoe.session.session_config import check_store, session_config
from evermoe.session.session_driver import SessionDriver
from evermoe.session.session_recovery import SessionContext
from evermoe.session.step import Step
from evermoe.session.step_gradients import StepGradients
from evermoe.session.training_inputs import TrainingInputs
from evermoe.state.deferred import Deferral, Initializer, WeightSource, find_deferral
from evermoe.state.loop_state import Stateful
from evermoe.state.lr_schedule import as_one_schedule
from evermoe.state.shards import TENSOR_PARALLEL
from evermoe.state.training_state import TrainingState

logger = logging.getLogger(__name__)


class Session(BetweenSteps):
    """Trains `model` with all members that are alive. See the module's head for what a step does.

        session = evermoe.Session(model, optimizer, evermoe.ElasticSampler(len(data), batch_size=64))
        for step in session.steps(1000):
            with step as indices:
                step.backward(model.loss(data[indices]))

    Args:
        model: any module on one device; its `evermoe.MoE` layers are spread over the members, the rest is replicated.
        optimizer: over the model's parameters (torch.optim.AdamW with fused=True is a good choice), or several of them
            that each step some: a list with Muon for matrices and AdamW for the rest. On experts it is elementwise, or
            steps each expert on its own.
        data: divides the global batches: an `ElasticSampler`, `ElasticReaders` or `ElasticLoader`, or a sampler of your
            own.
        preset: how the state is protected: the name of a preset, or its options, an object of `evermoe.presets`.
        replication: nodes that hold each unit's state after every step, those that train it included; 0 for no copies.
        membership: the job, and how long its members wait for each other.
        placement: which rank trains which expert.
        checkpoints: a folder that all members share or a URL; or all options of checkpoints.
        shard_optimizer: True: keep the optimizer's state of each module that is no expert on one worker, which takes
            its steps and sends the new weights to all. `"overlap"`: as True, and these weights are sent while
            the next forward computes; a module waits for its own before its forward or `state_dict`, and weights must
            be read in no other way between an update and the next backward. False: replicate it.
        max_grad_norm: clips the gradient's global norm, over the experts of all ranks; None for no clipping.
        on_nonfinite: action where a loss or a gradient of any member is infinite or NaN. `error`: end the job with
            `NonFiniteLoss` on all members, the state unchanged; `skip`: leave out the update of that step on all.
        seed: seeds the global generators of torch, NumPy and `random` from (seed, step, rank) for the block of each
            step, so that a repeated step draws the same numbers. Afterwards they are as the script left them. None:
            they are not seeded.
        scheduler: stepped by the session after each update, `ReduceLROnPlateau` with the step's loss; or several, each
            of one of the optimizers.
        scaler: its settings scale the losses of training in float16. The session scales, scales back and updates.
        weights: source of the first weights of a model built in `evermoe.deferred`: a `WeightSource`, or a
            function that initialises a module. None: its constructors.
        mesh: all processes of this island, in which `fully_shard` divides what is no expert; each of them is a member.
            See `evermoe.session.islands`. None: each member holds the model alone.
        on_gradients: called in each step on each member that trains, with the reduced gradients as an
            `evermoe.StepGradients`, before they are sent to replicas and clipped: what it changes in place is part of
            the step. It must make the same changes on all members, and is called again when a failure has interrupted
            the step. It costs a small all-reduce in each step, and no gradient is sent during backward.
        stateful: objects of the script by name whose states are kept with the loader's: a metric's best value, the
            patience of early stopping, the id of a tracker's run. All members have the same names and states; a state
            is JSON, and small. `load_state_dict` gets it in a restart, and on a member that joins. Change an object
            between two steps, on all members. After the loss of all processes the job resumes with the states at the
            update of its latest step.
        on_event: called with each event, a dataclass of `evermoe.events`: a function, or several (`evermoe.observe` has
            some). It must not block or raise. `ChunkSent`, `SnapshotReceived`, `GradientsLogged` and `Damaged` come
            from other threads.

    Raises:
        ValueError: an option is wrong, or another job writes to `checkpoints`. UnsupportedState: the optimizer's state
            cannot be divided into units, or a part of the model is deferred and another is not. OSError: `checkpoints`
            cannot be written to. TooFewFiles: this process may not open as many connections as `members` need.
            RuntimeError: a job of the same Lighthouse has ended in this process.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        data: Sampler,
        *,
        preset: PresetName | PresetOptions = "auto",
        replication: int = 2,
        membership: Membership | None = None,
        placement: Placement | None = None,
        checkpoints: Checkpoints | str | Path | None = None,
        shard_optimizer: bool | Literal["overlap"] = False,
        max_grad_norm: float | None = None,
        on_nonfinite: Literal["error", "skip"] = "error",
        seed: int | None = 0,
        scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
        scaler: torch.amp.GradScaler | None = None,
        weights: WeightSource | Initializer | None = None,
        mesh: DeviceMesh | None = None,
        on_gradients: Callable[[StepGradients], object] | None = None,
        stateful: Mapping[str, Stateful] | None = None,
        on_event: Listener | Sequence[Listener] = (),
    ) -> None:
        emit = combined(on_event, from_environment())
        self._config = config = session_config(
            preset=preset,
            replication=replication,
            membership=find_membership(membership),
            placement=placement,
            checkpoints=checkpoints,
            shard_optimizer=shard_optimizer,
            max_grad_norm=max_grad_norm,
            on_nonfinite=on_nonfinite,
            seed=seed,
            mesh=mesh,
            on_gradients=on_gradients,
            stateful=stateful,
        )
        joining = config.membership
        check_store(config)
        if joining.lighthouse is not None:
            ended_jobs.check_is_first(joining.lighthouse)
        self.model, self.optimizer, self.sampler, self.scheduler = model, optimizer, data, scheduler
        self.has_left = True
        """Whether the session has left its job, or has not begun."""
        together, schedule = as_one(optimizer), as_one_schedule(scheduler)
        script = TrainingInputs(model, together, data, schedule, LossScale(scaler), config.stateful or {})
        script.check(trains=joining.trains, in_island=mesh is not None)
        if joining.on_slow == "shift" and joining.trains:
            proportions.check(data)
        script.claim(self)
        deferral = find_deferral(model, together, weights)
        island = None if mesh is None else find_island(mesh)
        place = find_place(mesh)
        if joining.on_slow == "shift" and place.copies * place.parts > 1:
            raise ValueError(
                "on_slow='shift' and a mesh with tensor or context parallelism: its processes have the same samples, "
                "so that none of them can get fewer; use 'warn' or 'evict'"
            )
        shards = None if island is None else divide(model, together, island, place, deferral)
        is_sharded, choices = bool(config.shard_optimizer), config.copies.choices
        marks = choices.may_lose_tokens
        states = states_of(data)
        readers = None if states is None else states.tensor
        self._state = TrainingState(
            model,
            together,
            deferral=deferral,
            is_sharded=is_sharded,
            shards=shards,
            has_marks=marks,
            readers=readers,
        )
        arithmetics = find_arithmetics(together) if config.sends_gradients else {}
        job = joining.job or f"job-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        node, folder = node_name(joining.node), job_folder(joining.memory_dir or DEFAULT, job)
        self._store = SnapshotStore(folder / node, self._state, config.copies.name)
        self._store.check_folder()
        for layer in self._state.layers.values():
            layer.split_as(choices.token_split)
        common = config.shared() | script.common() | {"first weights": _describe(deferral)}
        variants = [arithmetics[each].variant if each in arithmetics else "none" for each in each_of(together)]
        rounding = ", ".join(variants) if config.sends_gradients else ""
        self._lighthouse, lighthouse = _find_lighthouse(joining.lighthouse)
        self._membership = MembershipManager(
            joining,
            lighthouse=lighthouse,
            identity=Identity(job, self._state.catalog.layout, common, rounding),
            node=node,
            device=(on := next(model.parameters()).device),
            side_device=on if config.shard_optimizer == "overlap" or needs_background(model, island) else None,
            island=island,
        )
        self.group = self._membership.trainer_group
        """The members that train: its `rank` and `size` change with them."""
        self.group.finishes_steps = island is not None
        for layer in self._state.layers.values():
            layer.group = self.group
        self._protection = Protection(self._state, self._store, self._membership, config.copies, arithmetics, emit)
        loader = LoaderWatch(data, self._membership, emit)
        if mesh is not None and shards is not None and place.copies > 1:
            shards.divide_tokens(self._state.layers.values(), mesh[TENSOR_PARALLEL].get_group())
        parts = SessionContext(script, self._state, self._membership, self._protection, config, emit, loader, place)
        self._driver = SessionDriver(parts, self._store.directory.parent, self.leave)
        self._protocol = CommitProtocol(
            self._driver,
            self._membership,
            members=joining.members or 1,
            join_interval=joining.join_interval,
            join_wait=joining.join_wait,
            rebalance_interval=config.placement.rebalance_interval,
            generation=max(self._store.newest_generation(), self._driver.saved_generation()),
            on_record=lambda said, commands: emit(Protocol(said, commands)),
        )
        self._preemption = PreemptionHandler(self.leave, joining.drain_timeout, self._driver)
        self.has_left = False

    @property
    def copied_step(self) -> int:
        """Steps that no failure which the preset covers can undo; -1 before the first copies."""
        return self._driver.history.committed if self._config.copies.replication else -1

    @property
    def windows(self) -> Windows | None:
        """Idle windows of this member's network, as the latest profiled steps had them; None before those."""
        return self._driver.window_planner.windows

    def sent(self) -> list[Sent]:
        """Return the latest transfers of copies, for `Profiler.write_trace`."""
        return self._protection.sent_messages()

    # ---- the loop

    def steps(self, until: int) -> Iterator[Step]:
        """Yield steps until `until` are taken, and again the one that a failure interrupted.

        On a replica node it yields nothing: it keeps the copies that others send, and returns when they are done. It
        returns earlier after `leave`. SIGTERM also ends the process then (code 143), as SIGUSR1 and SIGUSR2 do (75),
        and the end of a job that did not need this spare (0). `evermoe role` has it run its program again.

        Raises:
            SystemExit: the job ended without this member, it has left on a signal, or was a spare that nobody needed.
            FolderInUse: living processes of another run of the job use its memory folder or `checkpoints`.
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
                ended_jobs.remember(self._config.membership.lighthouse)
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
            self._membership.requests.steps = until
            self._stop_if_asked()
            self._driver.evaluations.release()
            self._driver.evaluations.substitute.put_back()
            self._protocol.look(self._end_of(until))
            while self._protocol.is_stepping and not self._membership.groups.start.begin():
                self._protocol.look(self._end_of(until))  # the group is dropped
            if self._protocol.is_over:
                if is_first and self.is_main:
                    logger.warning("nothing left to do: %d of %d steps are taken", self.step, until)
                break
            is_first = False
            if self._protocol.is_stepping:
                share = partial(self._driver.place.share, self._driver.loader, self.step, self.group)
                step = Step(self.step, self.generation, share, self._driver, self._commit, self._fail, self.group.drop)
                yield step
                if not step.is_entered and not self._driver.is_stale(step):
                    self._check_stops()

    def _commit(self, step: Step) -> bool:
        """Reduce, vote and update at the end of a step. Return whether it was taken."""
        before = self._driver.taken
        try:
            ballot = self._driver.finish_step(step)
        except PeerLost as lost:
            self._protocol.lose(str(lost))
            return False
        if self._driver.must_leave:
            self._preemption.evict()
        self._protocol.vote(ballot)
        if is_taken := self._driver.taken > before:
            self._driver.saving.begin_if_scheduled(self.version)
        return is_taken

    def _fail(self, failure: BaseException | None) -> None:
        """Leave the job after an error, so that no member waits; the memory stays for the next process."""
        self.group.drop(f"a member failed: {type(failure).__name__}")
        _leave_job(self)
        if self._membership.island is not None and is_group_error(failure):
            raise IslandLost(LOST) from failure

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
    if session._config.membership.job is None:
        session.close()
    else:
        session._leave()


def _end_too_late(session: Session) -> NoReturn:
    """Close the session of a worker whose job is over, and end its process: its script has no trained model.

    Raises:
        SystemExit: always.
    """
    session.close()
    if session._config.membership.role == "spare":
        logger.warning("the job is over, and this spare was not needed")
    else:
        logger.warning(
            "the job ended without this worker, whose model is at step %d: its process ends here, so that its script "
            "does not use that model",
            session.step,
        )
    raise SystemExit(0)
