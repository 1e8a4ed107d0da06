"""The session of a pipeline of `torch.distributed.pipelining`: copies in its bubbles, and recovery after a failure.

    step n   schedule ─ sum over data-parallel ranks ─ copies of n complete? ─ VOTE ─ update ─ n + 1 is copied
    failure  torch's groups are aborted ─ all ranks meet ─ newest complete version ─ torch's groups and the schedule

Version n is kept until version n + 1 is complete on all nodes, so after any loss one of the two can be assembled again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evermoe.comm.membership import MembershipManager
from evermoe.comm.messages import Identity
from evermoe.comm.quarantine import find_hardware
from evermoe.config.copies import CopyConfig
from evermoe.config.membership import Membership
from evermoe.config.placement import Placement
from evermoe.config.variables import find_membership
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.errors import UnsupportedState
from evermoe.events.base_event import Listener
from evermoe.observe.listeners import combined, from_environment
from evermoe.pipeline.border_log import Forwards
from evermoe.pipeline.pipeline_config import PipelineConfig
from evermoe.pipeline.pipeline_driver import PipelineDriver
from evermoe.pipeline.pipeline_loop import PipelineLoop
from evermoe.pipeline.pipeline_recovery import PipelineContext
from evermoe.pipeline.pipeline_step import LossFunction, PipelineStep
from evermoe.pipeline.stages import StageState
from evermoe.presets import PipelineVersions, pipeline_preset_options
from evermoe.process.memory_folder import DEFAULT, job_folder, node_name
from evermoe.session.base_session import BaseSession
from evermoe.session.loss_scale import LossScale
from evermoe.session.training_inputs import (
    check_types,
    refuse_balanced,
    refuse_divided,
    refuse_sparse_gradients,
    refuse_tensor_parallel,
    versions,
)
from evermoe.state.loop_state import LoopParts
from evermoe.state.lr_schedule import class_name

logger = logging.getLogger(__name__)


class PipelineSession(BaseSession):
    """Trains a pipeline with all its ranks; when a rank dies, another process takes its place.

        def build_schedule(session):                  # at the start, and again after each failure
            part = PipelineStage(module, stage, 2, device, group=session.pipeline_group, ...)
            return Schedule1F1B(part, microbatches, loss_fn=session.loss_function(mse_loss))

        session = evermoe.PipelineSession(module, optimizer, build_schedule, stage=stage, stages=2, data_parallel=peer,
                                          data_parallel_size=2)
        for step in session.steps(1000):
            with step:
                step.run(inputs, target=target)       # this data-parallel rank's batch of step.number

    Each stage's units are copied to other nodes in the bubbles of the schedule. All ranks of a stage hold the same
    modules and optimizer state, and share the work of copying them. The session makes torch's default group, in which
    this process has rank `rank` of `size`; it uses the process's one `evermoe.profile.Profiler`.

    Args:
        stage_module: this rank's stage, the same on all its ranks, on the CPU or on one GPU. With several virtual
            stages on each rank (interleaved schedules), an `nn.ModuleList` of them.
        optimizer: elementwise, over the parameters of the stage alone. The session steps it after each vote.
        build_schedule: called with the session whenever torch's groups were made; returns the schedule. Its groups and
            device meshes must be made here, the same on all ranks.
        stage: number of this rank's stage.
        stages: number of stages, 2 or more; virtual ones do not count.
        data_parallel: coordinate of this rank among those of its stage.
        data_parallel_size: number of ranks of each stage.
        preset: `baft` or `moetion`, or one with its options: `evermoe.presets.PipelineBaft` or `PipelineMoetion`.
        replication: nodes that hold each unit, its own included; 0 for no copies.
        membership: the job, and how long its ranks wait for each other. `members`, `domain`, `join_interval`,
            `join_wait`, `rejoin_timeout` and `allow_solo_resume` have no effect: a pipeline needs all its ranks.
        expert_parallel: whether the ranks of a stage divide the experts of its MoE layers (`evermoe.MoE`,
            `evermoe.Experts`) among them, so that tokens travel to the ranks of their experts. True: each expert has
            one rank, by its number. An `evermoe.Placement`: popular experts have replicas on several ranks of their
            stage, and move when the load shifts.
        localised: whether ranks log what they send to other stages, in host memory, so that after a failure only those
            that lost their state compute again.
        max_grad_norm: clips the gradient's global norm, over all stages; None for no clipping.
        on_nonfinite: action where a loss or a gradient of any rank is infinite or NaN. `error`: end the job with
            `NonFiniteLoss` on all ranks, the state unchanged; `skip`: leave out the update of that step on all.
        seed: seeds the global generators of torch, NumPy and `random` for the block of each step from (seed, step,
            rank), and in `step.run` for each microbatch, so that a repeated one draws the same numbers.
        scheduler: of the optimizer's learning rate, of the same class on all ranks. The session steps it after each
            step, and a newcomer resumes it.
        scaler: a `torch.amp.GradScaler`, the same on all ranks. The session scales losses and gradients, leaves out
            steps that overflow, and updates the scale; the script calls none of its methods.
        on_event: called with each event, as of `Session`.

    Raises:
        ValueError: an argument that is out of range or of another type.
        UnsupportedState: the optimizer keeps state that cannot be divided into units; parameters are divided among
            tensor-parallel or other ranks; or parameters are in float16 and there is a scaler.
    """

    _driver: PipelineDriver

    def __init__(
        self,
        stage_module: nn.Module,
        optimizer: torch.optim.Optimizer,
        build_schedule: Callable[[PipelineSession], Any],
        *,
        stage: int,
        stages: int,
        data_parallel: int = 0,
        data_parallel_size: int = 1,
        preset: Literal["baft", "moetion"] | PipelineVersions = "baft",
        replication: int = 2,
        membership: Membership | None = None,
        expert_parallel: bool | Placement = False,
        localised: bool = True,
        max_grad_norm: float | None = None,
        on_nonfinite: Literal["error", "skip"] = "error",
        seed: int = 0,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        scaler: torch.amp.GradScaler | None = None,
        on_event: Listener | Sequence[Listener] = (),
    ) -> None:
        emit = combined(on_event, from_environment())
        chosen = pipeline_preset_options(preset)
        config = PipelineConfig(
            stage=stage,
            stages=stages,
            data_parallel=data_parallel,
            data_parallel_size=data_parallel_size,
            versions=chosen,
            copies=CopyConfig(preset=chosen, replication=replication),
            membership=find_membership(membership),
            expert_parallel=expert_parallel,
            localised=localised,
            max_grad_norm=max_grad_norm,
            on_nonfinite=on_nonfinite,
            seed=seed,
        )
        for name, given in (("optimizer", optimizer), ("scheduler", scheduler)):
            if isinstance(given, list | tuple):
                kinds = ", ".join(type(each).__name__ for each in given)
                raise UnsupportedState(
                    f"PipelineSession: expected one {name}, got {len(given)}: {kinds}. A Session takes several; a "
                    "stage has one, whose groups may have different settings"
                )
        check_types(model=stage_module, optimizer=optimizer, scheduler=scheduler)
        if not callable(build_schedule):
            raise ValueError(f"expected build_schedule to be a function of the session, got {build_schedule!r}")
        refuse_tensor_parallel(stage_module)
        refuse_balanced(stage_module)
        refuse_divided(stage_module, optimizer)
        refuse_sparse_gradients(stage_module)
        _check_devices(stage_module)
        self.rank, self.size = config.rank, config.size
        self._loss_scale = LossScale(scaler)
        self._loss_scale.check(stage_module)
        self.optimizer = optimizer
        self._state = StageState(
            stage_module,
            optimizer,
            stage,
            config.data_parallel_size,
            config.place,
            config.versions.slices,
            config.chooses_experts,
            may_cut=not config.replay,
        )
        self._membership = _new_membership(config, self._loss_scale, scheduler)
        self._membership.messages.hardware = find_hardware(self._membership.node, self._state.device)
        folder = job_folder(config.membership.memory_dir or DEFAULT, self._membership.identity.job)
        store = SnapshotStore(folder / self._membership.node, self._state, config.copies.name)
        loop = LoopParts(None, optimizer, scheduler, self._loss_scale)
        parts = PipelineContext(
            config, stage_module, loop, self._loss_scale, self._state, store, self._membership, emit
        )
        self._driver = PipelineDriver(parts)
        self._loop = PipelineLoop(parts, self._driver, lambda: build_schedule(self), self.leave)
        self._protocol = self._loop.protocol

    @property
    def has_left(self) -> bool:
        """Whether the session has left its job."""
        return self._loop.has_left

    @property
    def is_main(self) -> bool:
        """Whether this rank is rank 0: the one that logs for all."""
        return self.rank == 0

    @property
    def loss_scale(self) -> float:
        """Factor of the losses in the next step; 1 without a scaler."""
        return self._loss_scale.value

    @property
    def forwards(self) -> Forwards:
        """Forwards of microbatches that this process has computed in `step.run`, and those that it has sent again.

        None are counted with `localised=False`.
        """
        return replace(self._driver.localised.log.forwards)

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """Torch's group of the ranks with this rank's data-parallel coordinate, stage by stage; None until it is made.

        Groups are remade after each failure.
        """
        return self._driver.connections.pipeline_group

    @property
    def data_parallel_group(self) -> dist.ProcessGroup | None:
        """Torch's group of the ranks of this stage; None if the stage has one rank. Remade after each failure."""
        return self._driver.connections.data_parallel_group

    # ---- the loop

    def steps(self, until: int) -> Iterator[PipelineStep]:
        """Yield steps until `until` are taken, and again the one that a failure interrupted.

            for step in session.steps(1000):
                with step:
                    step.run(inputs, target=target)

        Before the first step and after each failure it waits until all ranks have a process, brings them to one
        version, makes torch's groups and calls `build_schedule`. It ends all groups of `torch.distributed` in this
        process: first those of the script, and at the end those that it has made. SIGTERM, SIGUSR1 and SIGUSR2 make
        this rank leave after its step, and end the process.

        Raises:
            JoinTimeout: some rank did not come within `quorum_timeout` seconds.
            LostExperts: no copy of some units is left.
            FolderInUse: living processes of another run of the job use the job's memory folder.
            NonFiniteLoss: a loss or gradient is infinite or not a number on some rank; raised on all of them.
            UnequalForwards: ranks ran different numbers of schedules in the step that failed.
            UnsupportedState: losses are not known on ranks of the last stage.
            ValueError: ranks of a stage differ in their model or optimizer, or in what they were started with; or some
                ranks gave counts, and others did not.
            SystemExit: this rank has left on a signal, or the job was over when it came.
        """
        return self._loop.steps(until)

    def stop(self) -> None:
        """End the job on all ranks after the step in progress, as if that were the last one of `steps`.

        One rank is enough, and any thread may call it. Between two steps it counts from the next step on.
        """
        self._driver.asks_to_stop = True

    # ---- a step

    def loss_function(self, compute: LossFunction) -> LossFunction:
        """Make the `loss_fn` of the schedule.

        Args:
            compute: returns the mean loss of a microbatch, given its output and target; or the sum of its losses, if
                `step.run` is given a count.
        """

        def weighed(output: Any, target: Any) -> Tensor:
            if self._loop.current is None:
                raise UnsupportedState("a loss was computed outside of a step: call step.run inside `with step:`")
            return self._loop.current.weigh(checked, output, target)

        def checked(output: Any, target: Any) -> Tensor:
            loss = compute(output, target)
            if isinstance(loss, Tensor):
                self._driver.guard.check_loss(loss)
            return loss

        return weighed

    # ---- the end

    def close(self) -> None:
        """Leave the job and remove this rank's shared memory.

        `steps` does this when all steps are done. A loop that is left early, by `break` or an error, only leaves the
        job: its memory stays for the processes that resume with it, until this is called.
        """
        self._loop.close()


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
    shared = options.shared() | versions() | loss_scale.settings() | {"scheduler": class_name(scheduler)}
    joining = options.membership
    assert joining.lighthouse is not None and joining.job is not None  # PipelineConfig and find_membership refuse None
    return MembershipManager(
        joining,
        lighthouse=joining.lighthouse,
        identity=Identity(joining.job, shape, shared),
        node=node_name(joining.node),
        device=torch.device("cpu"),  # ranks vote on numbers of the host; copies leave it over TCP
        rank_key=f"{options.rank:06d}",
    )
