"""Protects a pipeline of `torch.distributed.pipelining`: copies in its bubbles, and the way back after a failure.

    step n   schedule ─ reduce over data-parallel peers ─ commit: copies of n whole? ─ VOTE ─ update ─ n + 1 is copied
    failure  PeerLost or torch's own error ─ recover: torch's groups end ─ all seats taken again ─ newest whole version

Version n is kept until version n + 1 is whole on all nodes, so after any loss one of the two can be assembled again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evermoe.comm.membership import MembershipManager
from evermoe.comm.messages import Identity
from evermoe.comm.torch_groups import end_torch_groups
from evermoe.errors import PeerLost, UnsupportedState
from evermoe.events import Listener, Protocol
from evermoe.memory_folder import BEGUN, job_folder, mark, node_name
from evermoe.observe import combined
from evermoe.options import check_known
from evermoe.recovery.report import Outcome
from evermoe.seeds import seeded
from evermoe.snapshot.store import SnapshotStore
from evermoe.state.lr_schedule import class_name
from evermoe.train.border_log import Forwards
from evermoe.train.kept_loop import KeptLoop
from evermoe.train.loss_scale import LossScale
from evermoe.train.pipeline_config import PipelineConfig
from evermoe.train.pipeline_driver import PipelineDriver
from evermoe.train.pipeline_step import LossFunction, PipelineStep
from evermoe.train.protocol import CommitProtocol
from evermoe.train.stages import StageState
from evermoe.train.training_inputs import (
    check_types,
    refuse_balanced,
    refuse_divided,
    refuse_scaled,
    refuse_tensor_parallel,
    versions,
)

ENDLESS = (1 << 40) - 1
"""Steps of a job that its script ends."""


class PipelineSession:
    """Copies of a pipeline stage's units on other nodes, made in the bubbles of the schedule.

        copies = evermoe.PipelineSession(module, optimizer, stage=s, stages=2, data_parallel=d, data_parallel_size=2,
                                        preset="baft", lighthouse=address, job="big")
        step, schedule = 0, None
        while step < steps:
            try:
                if schedule is None:                   # at the start, and after a failure
                    step = copies.recover()            # waits for all ranks
                    with copies.connecting():          # torch's groups: the default one, and those made here
                        schedule = build_schedule(module, loss_fn=copies.loss_function(mse_loss))
                with copies.begin() as attempt:        # leaving the block commits, instead of optimizer.step()
                    attempt.run(schedule, *batch(step))
                    attempt.reduce(peers)              # over the data-parallel peers
                step = copies.step
            except (evermoe.PeerLost, RuntimeError):
                schedule = None
        copies.close()

    Every rank holds its stage's modules with their optimizer state; ranks of one stage hold the same and share the work
    of copying it. With several virtual stages on each rank (interleaved schedules), the stage is an `nn.ModuleList` of
    them, and its number the rank's place in the pipeline. A process that died is replaced by another one with the same
    `stage` and `data_parallel`. While it lives, it has the process's one `evermoe.profile.Profiler`.

    A script that averages gradients itself calls `begin()`, `schedule.step(…)` and `commit()`; then the session knows
    no losses, and has no scaler. A RuntimeError of the script itself is repeated for ever.

    Args:
        stage_module: this rank's stage, the same on all its ranks, on the CPU or on one GPU.
        optimizer: elementwise, over the parameters of the stage alone; stepped by `commit`.
        scheduler: of the optimizer's learning rate, of the same class on all ranks. The session steps it after each
            step, and a newcomer resumes it.
        scaler: a `torch.amp.GradScaler`, alike on all ranks. The session scales losses, scales gradients back, leaves
            out steps that overflow, and updates the scale; its methods are not to be called.
        on_event: as of `Session`; told of `ChunkSent`, `Damaged`, `MemberLost`, `Protocol` and `SnapshotReceived`.
        options: fields of `PipelineConfig`.

    Raises:
        ValueError: an argument that is out of range or of another type.
        UnsupportedState: the optimizer keeps state that cannot be divided into units; parameters are divided among
            tensor-parallel or other ranks; or there is a scaler, and parameters are in float16.
    """

    def __init__(
        self,
        stage_module: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
        on_event: Listener | Sequence[Listener] = (),
        **options: Any,
    ) -> None:
        check_known(options, PipelineConfig.names())
        emit = combined(on_event)
        self.config = PipelineConfig(**options)
        check_types(model=stage_module, optimizer=optimizer, scheduler=scheduler)
        refuse_tensor_parallel(stage_module)
        refuse_balanced(stage_module)
        refuse_divided(stage_module, optimizer)
        _check_devices(stage_module)
        self.rank, self.size = self.config.rank, self.config.size
        self._loss_scale = LossScale(scaler)
        self._loss_scale.check(stage_module)
        self.optimizer = optimizer
        loop, peers = KeptLoop(optimizer, scheduler, self._loss_scale), self.config.data_parallel_size
        place, slices, stage = self.config.place, self.config.slices, self.config.stage
        has_tokens, may_cut = self.config.chooses_experts, not self.config.replay
        self._state = StageState(
            stage_module, optimizer, stage, loop, peers, place, slices, has_tokens, may_cut=may_cut
        )
        self._current: PipelineStep | None = None
        self._random = ExitStack()
        """Restores the random generators after a step."""
        self._has_seen_loss = False
        self._guard = optimizer.register_step_pre_hook(self._refuse_step)
        self._membership = _new_membership(self.config, self._loss_scale, scheduler)
        node = self._membership.node
        folder = job_folder(self.config.memory_dir, self.config.job) / node
        self._store = SnapshotStore(folder, self._state, self.config.preset)
        self._group = self._membership.trainer_group
        self._driver = PipelineDriver(
            self.config, optimizer, self._state, loop, self._loss_scale, self._store, self._membership, emit
        )
        self._connections = self._driver.connections
        self._protocol = CommitProtocol(
            self._driver,
            self._membership,
            members=self.size,
            is_fixed=True,
            generation=self._store.newest_generation(),
            on_record=lambda said, commands: emit(Protocol(said, commands)),
        )

    @property
    def step(self) -> int:
        """Steps that were taken."""
        return self._protocol.step

    @property
    def version(self) -> int:
        """Version of the state: see `evermoe.state.version`."""
        return self._protocol.version

    @property
    def loss(self) -> float:
        """Mean loss of the latest step, over all microbatches and peers, on all ranks; NaN where it is not known."""
        return self._driver.loss

    @property
    def loss_scale(self) -> float:
        """What losses are multiplied by in the next step; 1 without a scaler."""
        return self._loss_scale.value

    @property
    def outcome(self) -> Outcome:
        """What the latest recovery did."""
        return self._driver.outcome

    @property
    def forwards(self) -> Forwards:
        """Forwards of microbatches that this process has computed in `step.run`, and those that it has sent again.

        None are counted with `localised=False`.
        """
        return replace(self._driver.localised.log.forwards)

    # ---- a step

    def loss_function(self, compute: LossFunction) -> LossFunction:
        """Makes the `loss_fn` of a schedule that is run by `step.run`.

        Args:
            compute: of a microbatch's output and target, the mean loss; or its sum, where `step.run` is given a count.
        """

        def weighed(output: Any, target: Any) -> Tensor:
            if self._current is None:
                raise UnsupportedState("a loss was computed outside of a step: call session.begin() first")
            return self._current.weigh(checked, output, target)

        def checked(output: Any, target: Any) -> Tensor:
            loss = compute(output, target)
            if not self._has_seen_loss and isinstance(loss, Tensor):
                self._has_seen_loss = True
                refuse_scaled(loss)
            return loss

        return weighed

    def begin(self) -> PipelineStep:
        """A step begins: no gradients are left of the one before."""
        self.optimizer.zero_grad(set_to_none=True)
        past = self._driver.localised.begin(self.version)
        self._driver.pacer.begin_forward()
        seeds = self.config.seed, self.config.data_parallel
        self._random.close()
        self._random.enter_context(seeded(*seeds, self.step, self.config.stage))
        self._current = self._driver.attempt = PipelineStep(
            self.step,
            self._state.parameters()[0],
            peers=self.config.data_parallel_size,
            scale=self._loss_scale.value,
            generation=self._membership.generation,
            commit=self.commit,
            past=past,
            is_repeated=self._driver.localised.is_repeated(self.step),
            seeds=seeds,
            uses_host=self._connections.uses_host,
        )
        return self._current

    def _refuse_step(self, *_: object) -> None:
        if self._current is not None and self._current.is_open:
            raise UnsupportedState(
                "optimizer.step() was called inside `with session.begin():`, but the session steps the optimizer "
                "itself, once all ranks have voted: leave the call out. A torch.amp.GradScaler, whose step() calls it, "
                "goes to the session: PipelineSession(scaler=...)"
            )

    def commit(self) -> int:
        """Votes on the step, takes `optimizer.step()`, and begins to copy the new version; gradients must be complete.

        The end of `with session.begin():` calls it.

        Returns:
            The steps taken: the number of the next one.

        Raises:
            NonFiniteLoss: a loss or gradient is infinite or not a number on some rank; raised on all of them.
            PeerLost: a rank is gone. The step may have been taken or not, which `recover` finds out: leave the
                gradients as they are until then.
            UnsupportedState: gradients were not reduced, or losses are not known on ranks of the last stage.
            ValueError: some ranks gave counts, and others did not.
        """
        self._random.close()
        step, before = self._current, self._driver.taken
        if step is not None:
            step.end()
        try:
            is_whole = self._driver.begin_vote(self.step + 1)
            if self._protocol.is_ready:
                self._protocol.vote(self._driver.ballot(is_whole))
        finally:
            self._driver.end_vote()
        if self._driver.taken == before:
            raise PeerLost(f"step {self.step} was not taken: {self._group.broken}")
        if step is not None:
            step.committed = True
        self._driver.pace(self.step)
        if self._group.broken is None:
            self._protocol.look(ENDLESS)
        return self.step

    # ---- failures

    def recover(self) -> int:
        """Waits until there is a process for every stage and coordinate, and brings all to one version. Collective.

        Ends all groups of `torch.distributed` in this process; make them anew afterwards, in `connecting`.

        Returns:
            The step to resume from, the same on all ranks.

        Raises:
            JoinTimeout: some rank did not come within `quorum_timeout` seconds.
            LostExperts: of some units no copy is left.
            FolderInUse: living processes of another run of the job use the job's memory folder.
            UnequalForwards: ranks ran different numbers of schedules in the step that failed.
            ValueError: ranks of a stage differ in their model or optimizer, or in what they were started with.
        """
        end_torch_groups()
        if self._current is not None:
            self._current.is_open = False
        self._protocol.lose("this rank recovers")
        if self._connections.uses_nccl:  # the host ran ahead of kernels that may have ended with half of their work
            self._driver.localised.log.drop_unfinished()
        self._driver.localised.log.interrupt()
        self._driver.interrupt()
        while not self._protocol.is_ready:
            self._protocol.look(ENDLESS)
            if not self._protocol.is_ready:
                self._driver.interrupt()
        mark(BEGUN)
        return self.step

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Makes the default group of `torch.distributed`; make all other groups inside. Collective.

        It is of gloo; for tensors on GPUs, of NCCL. Where ranks share a GPU all is gloo's, and what stages exchange in
        `step.run` goes through host memory.

        Global ranks are `rank` of `size`. Groups that are given no time limit have `hang_timeout`. Once a rank is lost
        no rank waits for it any more, nor two seconds after its process was stopped or its host fell silent; for one
        that hangs and answers, as long as `hang_timeout`.

        Raises:
            PeerLost: a rank is gone, or did not get here in time: `recover`.
            RuntimeError: of torch, for the same reason.
            ValueError: there was no `recover` before.
        """
        if not self._driver.seats:
            raise ValueError("PipelineSession: connecting() is for after recover(), as ranks meet there")
        with self._connections.made():
            yield

    def verify(self) -> tuple[int, list[str]]:
        """Compares all ranks' units and copies of this version, once they are whole, by digest. Collective.

        Returns:
            How many were compared, and the units of which some differ.

        Raises:
            PeerLost: a rank is gone.
        """
        self._driver.interrupt(self.version)
        return self._driver.recovery(self.version, established=True).verify()

    def write_trace(self, path: str | Path) -> None:
        """Writes this rank's latest steps, its windows and its copies for Perfetto; `evermoe trace` merges the ranks'.

        Raises:
            ValueError: no step is over since the last recovery.
        """
        self._driver.bubbles.write_trace(path, list(self._driver.courier.sent))

    def close(self) -> None:
        """The job is over here: waits until the copies of the last step are whole, and leaves."""
        self._driver.interrupt(self.version)
        with suppress(PeerLost):
            self._group.all_reduce(torch.zeros(1))
        self._connections.leave()
        self._guard.remove()
        self._driver.replay.end()
        self._membership.close()
        self._driver.end()
        self._driver.run.leave()
        self._store.close(self._membership.id)


def _check_devices(module: nn.Module) -> None:
    devices = sorted({str(parameter.device) for parameter in module.parameters()})
    if len(devices) != 1 or torch.device(devices[0]).type not in ("cpu", "cuda"):
        raise ValueError(
            f"PipelineSession: expected a stage with parameters, all on the CPU or on one GPU, got some on {devices}"
        )


def _new_membership(
    options: PipelineConfig, loss_scale: LossScale, scheduler: torch.optim.lr_scheduler.LRScheduler | None
) -> MembershipManager:
    shape = f"a pipeline of {options.stages} stages with {options.data_parallel_size} ranks each"
    shared = options.shared() | options.copy_options().shared() | options.window_options().shared() | versions()
    shared |= loss_scale.settings() | {"scheduler": class_name(scheduler)}
    shared["on_lost"] = "missing" if options.on_lost is None else "given"
    return MembershipManager(
        options.membership_options(),
        lighthouse=options.lighthouse,
        identity=Identity(options.job, shape, shared),
        node=node_name(options.node),
        device=torch.device("cpu"),  # ranks vote on numbers of the host; copies leave it over TCP
        rank_key=f"{options.rank:06d}",
    )
