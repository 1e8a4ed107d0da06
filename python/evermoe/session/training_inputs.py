"""The inputs of a training script: checks whether they can be trained, and what all members must share."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from evermoe.data.sampler import Sampler
from evermoe.errors import UnsupportedState
from evermoe.moe.expert_copies import is_averaged_apart
from evermoe.moe.experts import expert_layers
from evermoe.moe.layer import layer_settings
from evermoe.optim.combined import each_of
from evermoe.session.loss_scale import LossScale
from evermoe.state import loop_state
from evermoe.state.lr_schedule import Scheduler, class_name, schedules_of
from evermoe.state.training_state import TrainingState

WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel", "AveragedModel")
"""Classes of modules that keep, reduce or divide parameters themselves."""
SHARDED = ("DTensor", "ShardedTensor", "FlatParameter")
"""Classes of parameters of which each process has a part."""
MAX_FACTORS = 8
"""Operations at the end of a loss among which a scaler's factor is searched."""

_SCHEDULED = "scheduled"
_WHY = {"AveragedModel": "would be trained in place of the model that it averages"}
_WHY_OTHERS = "reduces gradients or divides parameters itself, but a session does that, and its members change"

_trained: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The session of each module that one trains."""


class TrainingInputs(NamedTuple):
    """The inputs that a training script gives its session."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sampler: Sampler
    scheduler: Scheduler | None
    loss_scale: LossScale
    stateful: Mapping[str, loop_state.Stateful]
    """The script's own objects with state, by name."""

    @property
    def loop(self) -> loop_state.LoopParts:
        """Objects with state of the loop."""
        return loop_state.LoopParts(self.sampler, self.optimizer, self.scheduler, self.loss_scale, self.stateful)

    def check(self, *, trains: bool, in_island: bool = False) -> None:
        """Check all types, and on a member that trains the size of the loop's state.

        Args:
            trains: whether this member does.
            in_island: whether processes of this member's island may divide parameters, with FSDP2 or as DTensors.

        Raises:
            ValueError: an input is of another type, or a loader's first batch cannot be divided. Several optimizers
                do not step each trainable parameter once. A scheduler is of none of them.
            UnsupportedState: an input divides or reduces parameters among processes itself, averages them, or has
                sparse gradients; or the loop's states are no JSON, or too large.
        """
        check_types(model=self.model, optimizer=self.optimizer, sampler=self.sampler, scheduler=self.scheduler)
        _check_shares(self.model, self.optimizer, self.scheduler)
        refuse_divided(self.model, self.optimizer, in_island=in_island)
        refuse_sparse_gradients(self.model)
        _refuse_averages(self.model)
        _refuse_missing_adapters(self.model)
        self.loss_scale.check(self.model)
        if trains:
            loop_state.LoopState().store(loop_state.collect(self.loop))

    def zero_gradients(self, state: TrainingState) -> None:
        """Free the gradients of all parameters of a state, those that the optimizer does not step included.

        `model.zero_grad` would visit all modules: 1.5 ms with 600 of them.
        """
        self.optimizer.zero_grad(set_to_none=True)
        for parameter in state.dense:
            parameter.grad = None
        if state.shards is not None:
            state.shards.drop_gradients()
        for layer in state.layers.values():
            layer.weights.grad = None

    def claim(self, session: Any) -> None:
        """Make `session` the one that trains the model, until it has left its job or is gone.

        Raises:
            ValueError: another session trains it.
        """
        others = {id(module): _trained[module] for module in self.model.modules() if module in _trained}
        if any(_is_live(other) for other in others.values()):
            gc.collect()  # a session to which only its own threads refer
        if any(_is_live(other) for other in others.values()):
            raise ValueError(
                "another session trains this model, or a part of it: end its loop or call its close() first, or make a "
                "model and an optimizer of its own for each session"
            )
        _trained.update(dict.fromkeys(self.model.modules(), weakref.ref(session)))

    def common(self) -> dict[str, str]:
        """Return text by name that must be the same for all members: data, classes, settings of layers, versions."""
        layers = Counter(layer_settings(self.model))
        return {
            **{name: str(value) for name, value in self.sampler.settings().items()},
            "optimizer": ", ".join(map(class_name, each_of(self.optimizer))),
            **_settings(self.optimizer),
            "scheduler": ", ".join(map(class_name, schedules_of(self.scheduler))) or class_name(None),
            "MoE layers": " and ".join(f"{count} of {settings}" for settings, count in layers.items()),
            **self.loss_scale.settings(),
            **versions(),
        }


def _settings(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the settings of the optimizer's groups before the first step: of each group, or one if all are equal."""
    groups = [loop_state.group_options(group) for group in optimizer.param_groups]
    names = dict.fromkeys(name for group in groups for name in group)
    # Names are in the layout's digest; how a step is computed is in `arithmetic`.
    hidden = {"param_names", "fused", "foreach", "capturable", "differentiable"}
    found = {name: [_setting(group, name) for group in groups] for name in names if name not in hidden}
    return {
        f"optimizer's {name}": each[0] if len(set(each)) == 1 else ", ".join(each)
        for name, each in found.items()
        if set(each) != {_SCHEDULED}
    }


def _setting(group: Mapping[str, Any], name: str) -> str:
    """Return a setting as text; a scheduler changes some, and keeps the first learning rate as initial_lr."""
    if "initial_lr" in group and name in loop_state.SCHEDULED:
        return _SCHEDULED
    return str(group.get(name, "missing"))


def versions() -> dict[str, str]:
    """Return the versions of software and messages, which all members must share."""
    try:
        own = version("evermoe")
    except PackageNotFoundError:
        own = "not installed"  # runs from its sources
    return {"evermoe": own, "torch": torch.__version__}


def refuse_scaled(loss: Tensor) -> None:
    """Refuse a loss that `torch.amp.GradScaler` has scaled: nothing here would scale its gradients back.

    Raises:
        UnsupportedState: a scaler of this process has multiplied it.
    """
    factors, node = set(), loss.grad_fn
    for _ in range(MAX_FACTORS):
        if node is None:
            break
        saved = (getattr(node, name, None) for name in ("_saved_self", "_saved_other"))
        factors |= {each.data_ptr() for each in saved if isinstance(each, Tensor) and each.dim() == 0}
        before = [each for each, _ in node.next_functions if each is not None]
        node = before[0] if len(before) == 1 else None
    if not factors:
        return
    scales = (
        getattr(each, "_scale", None) for each in gc.get_objects() if issubclass(type(each), torch.amp.GradScaler)
    )
    if any(scale is not None and scale.data_ptr() in factors for scale in scales):
        raise UnsupportedState(
            "step.backward: the loss is scaled by a torch.amp.GradScaler, but the session steps the optimizer itself "
            "and would not scale the gradients back: leave the call of scale() out and give the scaler to the session, "
            "Session(scaler=...), which then scales, scales back and updates; or use bfloat16 without one."
        )


def check_types(**given: object) -> None:
    """Check the types of a script's inputs, by name; the scheduler may be None.

    Raises:
        ValueError: one is of another type.
    """
    kinds = {
        "model": nn.Module,
        "optimizer": torch.optim.Optimizer,
        "sampler": Sampler,
        "scheduler": torch.optim.lr_scheduler.LRScheduler,
    }
    for name, value in given.items():
        if not isinstance(value, kinds[name]) and not (name == "scheduler" and value is None):
            got = [type(each).__name__ for each in value] if isinstance(value, list | tuple) else repr(value)
            message = f"expected {name} to be a {kinds[name].__module__}.{kinds[name].__name__}, got {got}"
            if isinstance(value, DataLoader):
                message += ": wrap it, evermoe.ElasticLoader(loader), or use ElasticSampler(len(dataset), batch_size)"
            raise ValueError(message)


def _check_shares(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Scheduler | None) -> None:
    optimizers = each_of(optimizer)
    for schedule in schedules_of(scheduler):
        if not any(schedule.optimizer is each for each in optimizers):
            raise ValueError(
                f"the scheduler {type(schedule).__name__} is of another {type(schedule.optimizer).__name__} than the "
                "session's: make it from an optimizer that the session gets"
            )
    if len(optimizers) == 1:
        return
    of: dict[int, list[str]] = {}
    for number, each in enumerate(optimizers):
        for parameter in (p for group in each.param_groups for p in group["params"]):
            of.setdefault(id(parameter), []).append(f"{type(each).__name__} (number {number})")
    for name, parameter in model.named_parameters():
        found = of.get(id(parameter), [])
        if len(found) > 1:
            raise ValueError(f"parameter {name} is in {' and '.join(found)}: expected each parameter in one optimizer")
        if not found and parameter.requires_grad:
            raise ValueError(
                f"parameter {name} is in none of the optimizers {optimizer!r}: add it to one of them, or freeze it "
                "with requires_grad_(False)"
            )


def refuse_divided(model: nn.Module, optimizer: torch.optim.Optimizer, *, in_island: bool = False) -> None:
    """Refuse parameters or optimizers of which each process has a part, and modules that reduce gradients themselves.

    Args:
        model: whose modules and parameters they are.
        optimizer: of the model.
        in_island: whether FSDP2 and DTensors may divide what is no expert.

    Raises:
        UnsupportedState: there is one.
    """
    _refuse_wrappers(model, in_island=in_island)
    if any(kind.__name__ == "ZeroRedundancyOptimizer" for each in each_of(optimizer) for kind in type(each).__mro__):
        raise UnsupportedState(
            "ZeroRedundancyOptimizer steps a part of the parameters on each process, but a member of a session "
            "steps all that it holds: give the session the optimizer that it wraps"
        )


def refuse_tensor_parallel(stage: nn.Module) -> None:
    """Refuse a stage whose parameters are spread over tensor-parallel ranks.

    Raises:
        UnsupportedState: names the parameter.
    """
    for path, parameter in stage.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False) or "DTensor" in _kinds(parameter):
            raise UnsupportedState(
                f"parameter {path} is divided among tensor-parallel ranks, but a PipelineSession copies and recovers "
                "stages whose ranks each hold all of it: use pipeline and data parallelism alone, or more stages"
            )


def refuse_balanced(stage: nn.Module) -> None:
    """Refuse routers whose bias follows the load: no rank of a pipeline knows the load of its peers in each step.

    Raises:
        UnsupportedState: names the layer.
    """
    for path, layer in expert_layers(stage).items():
        if layer.on_load is not None:
            raise UnsupportedState(
                f"layer {path} expects the load of all ranks after each step, as a Router with balance_rate is, "
                "but a PipelineSession does not count it: leave balance_rate out"
            )


def _kinds(value: object) -> set[str]:
    return {kind.__name__ for kind in type(value).__mro__}


def _refuse_wrappers(model: nn.Module, *, in_island: bool) -> None:
    experts = {id(layer.weights) for layer in expert_layers(model).values()}
    allowed = {"FSDPModule", "DTensor"} if in_island else set()
    for path, module in model.named_modules():
        for name in _kinds(module) & set(WRAPPERS) - allowed:
            raise UnsupportedState(
                f"{name}, at {path or 'the top'} of the model, {_WHY.get(name, _WHY_OTHERS)}: give the session the "
                "module that it wraps"
            )
    for path, parameter in model.named_parameters():
        kinds = _kinds(parameter) & set(SHARDED)
        if kinds and id(parameter) in experts:
            raise UnsupportedState(
                f"parameter {path} has the experts of a layer and is a {kinds.pop()}, but a session spreads experts "
                "over all members itself: leave it out, as in fully_shard(module, ignored_params={layer.weights})"
            )
        for name in kinds - allowed:
            raise UnsupportedState(
                f"parameter {path} is a {name}, of which each process has a part, but a member of a session holds all "
                "of a module: do not call fully_shard, parallelize_module or distribute_tensor for it, or give the "
                "session the mesh of the processes that hold it together, Session(mesh=...)"
            )


def refuse_sparse_gradients(model: nn.Module) -> None:
    """Refuse embeddings whose gradients are sparse: gradients are summed as dense ones.

    Raises:
        UnsupportedState: there is one.
    """
    for path, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise UnsupportedState(
                f"{type(module).__name__}, at {path or 'the top'} of the model, has sparse gradients, which members do "
                "not sum: give it sparse=False"
            )


def _refuse_averages(model: nn.Module) -> None:
    """Refuse an average that a copy of the model keeps: a session moves experts, but not the copy's.

    Raises:
        UnsupportedState: there is one.
    """
    if any(is_averaged_apart(layer) for layer in expert_layers(model).values()):
        raise UnsupportedState(
            "a torch.optim.swa_utils.AveragedModel of this model exists: its experts stay where they are while a "
            "session moves the model's, so that it would average other experts. Make an evermoe.optim.EMA(optimizer) "
            "instead, whose averages move with them"
        )


def _refuse_missing_adapters(model: nn.Module) -> None:
    """Refuse a model in which peft has not found the experts that it was to adapt, as they were elastic before.

    Raises:
        UnsupportedState: names a matrix of them.
    """
    for adapted in model.modules():
        configs = vars(adapted).get("peft_config")
        for config in configs.values() if isinstance(configs, dict) else ():
            targets = tuple(f".{name}" for name in getattr(config, "target_parameters", None) or ())
            for path, layer in adapted.named_modules():
                for name in getattr(layer, "adaptable", ()):
                    if f".{path}.{name}".replace(".base_layer", "").endswith(targets) and name not in layer.adapted:
                        raise UnsupportedState(
                            f"LoraConfig(target_parameters=...) names {name} of {path}, and peft has found no such "
                            "parameter, so that it has no adapter: call get_peft_model first, then make_elastic"
                        )


def _is_live(reference: weakref.ref[Any]) -> bool:
    session = reference()
    return session is not None and not session.has_left
