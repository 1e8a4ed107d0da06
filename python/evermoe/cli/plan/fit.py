"""`evermoe plan --model`: whether a model fits into the workers' memory, on how many nodes, and the memory by part."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import evermoe
from evermoe.options import require
from evermoe.planning.footprint import PHASES, Footprint, PhaseName, Use, footprint
from evermoe.planning.models import MODELS, ModelShape, find_model
from evermoe.planning.placement import session_slots
from evermoe.planning.presets import PRESET_NAMES
from evermoe.planning.seating import FootprintOptions

MAX_NODES = 4096
"""Largest number of nodes that is tried."""
MAX_WORKERS = 1 << 14
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
LIMITS = {"expert_slots": 1 << 24, "min_replicas": 1 << 24, "replication": 64, "workers_per_node": 1 << 10}
"""Largest values of flags; the least is 1."""
COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
OWN = (
    "memory",
    "workers_per_node",
    "weights",
    "preset",
    "device",
    "no_copies",
    "shard_optimizer",
    "frozen",
    "adapters",
    "adapt_experts",
)
"""Flags that need `--model`."""
SHARED = ("replication",)
"""Flags of the group `copies` that also work with `--model`."""


@dataclass(frozen=True)
class FitSetting:
    """The checked flags."""

    name: str
    shape: ModelShape
    options: FootprintOptions
    memory: int
    """Memory of each worker in bytes."""
    is_on_gpu: bool
    """Whether parameters are in device memory and copies in host memory."""

    @property
    def counted(self) -> Callable[[Use], int]:
        """Function that returns the bytes of a worker that have to fit into `memory`."""
        return (lambda use: use.device) if self.is_on_gpu else (lambda use: use.process + use.snapshots)

    @property
    def nodes(self) -> int:
        """Machines that fail on their own."""
        return self.options.workers // self.options.workers_per_node

    def on(self, nodes: int) -> FitSetting:
        """Return the same setting on another number of nodes."""
        return replace(self, options=replace(self.options, workers=nodes * self.options.workers_per_node))


@dataclass(frozen=True)
class FitReport:
    """Result of `plan_fit`."""

    setting: FitSetting
    footprint: Footprint
    peaks: dict[PhaseName, tuple[str, Use]]
    """Peak of each phase: the moment, and the use of the worker that needs the most memory."""
    fewest_nodes: int | None
    """Fewest nodes on which the model fits; None if it fits on no number up to `MAX_NODES`."""
    ways: tuple[tuple[str, int], ...]
    """If it fits on no number of nodes: flags with which it fits, and the fewest nodes with them."""

    @property
    def needed(self) -> int:
        """Bytes that have to fit at the largest peak."""
        return max(self.setting.counted(use) for _, use in self.peaks.values())

    @property
    def fits(self) -> bool:
        """Whether the model fits on the requested nodes."""
        return self.needed <= self.setting.memory


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the group `memory`."""
    group = parser.add_argument_group("memory, with --model")
    group.add_argument(
        "--model", metavar="NAME|FOLDER", help=f"{', '.join(MODELS)}; or a folder with a config.json of transformers"
    )
    group.add_argument("--memory", metavar="SIZE", help="memory of each worker, such as 80GB or 24GiB")
    group.add_argument(
        "--workers-per-node", type=int, metavar="WORKERS", help="workers of a node, which fail together (1)"
    )
    group.add_argument(
        "--weights",
        choices=("bfloat16", "float16", "float32"),
        help="type of parameters and gradients; the 16-bit ones have a float32 master (bfloat16)",
    )
    group.add_argument(
        "--frozen",
        choices=("experts", "dense"),
        help="parameters that are not trained, and that the optimizer does not have: experts, or all but experts",
    )
    group.add_argument(
        "--adapters",
        metavar="PARAMETERS",
        help="parameters of LoRA's adapters, such as 13.6M, as peft's print_trainable_parameters() prints them; "
        "everything else is frozen",
    )
    group.add_argument(
        "--adapt-experts",
        action="store_true",
        help="--adapters counts those of experts (target_parameters), whose changed matrices a step has in addition",
    )
    group.add_argument("--preset", choices=PRESET_NAMES, help="how the state is protected (auto)")
    group.add_argument(
        "--shard-optimizer",
        action="store_true",
        help="keep the optimizer state of each module that is no expert on one worker",
    )
    group.add_argument("--no-copies", action="store_true", help="replication=0: nothing is protected")
    group.add_argument(
        "--device",
        choices=("gpu", "cpu"),
        help="gpu: --memory is device memory, and the host memory for copies is listed separately; cpu: --memory "
        "covers both (gpu)",
    )


def refuse_fit_flags(options: argparse.Namespace) -> None:
    """Refuse flags that need `--model`.

    Raises:
        ValueError: one is given.
    """
    for name in OWN:
        if getattr(options, name) not in (None, False):
            raise ValueError(f"--{name.replace('_', '-')}: expected --model with it, which is missing")


def parse_fit(options: argparse.Namespace) -> FitSetting:
    """Check the flags and return the setting.

    Raises:
        ValueError: with the flag, what was expected and what came.
    """
    _refuse_others(options)
    require(
        {
            "--nodes, the machines that fail on their own": options.nodes,
            "--memory, that of each worker, such as 80GB": options.memory,
        }
    )
    for name, most in LIMITS.items():
        value = getattr(options, name)
        if value is not None and not 1 <= value <= most:
            raise ValueError(f"--{name.replace('_', '-')}: expected 1 to {most}, got {value}")
    per_node = options.workers_per_node or 1
    if not 1 <= options.nodes <= MAX_WORKERS // per_node:
        raise ValueError(f"--nodes: expected 1 to {MAX_WORKERS // per_node} with --model, got {options.nodes}")
    given = {
        "expert_slots": options.expert_slots,
        "min_replicas": options.min_replicas,
        "weights": options.weights,
        "preset": options.preset,
        "shard_optimizer": options.shard_optimizer,
        "replication": 0 if options.no_copies else options.replication,
    }
    chosen = FootprintOptions(
        workers=options.nodes * per_node,
        workers_per_node=per_node,
        **{name: value for name, value in given.items() if value is not None},
    )
    memory, is_on_gpu = parse_size(options.memory), options.device != "cpu"
    shape = _trained_as(read_model(options.model), options.frozen, options.adapters, options.adapt_experts)
    return FitSetting(options.model, shape, chosen, memory, is_on_gpu)


def _trained_as(shape: ModelShape, frozen: str | None, adapters: str | None, adapt_experts: bool) -> ModelShape:
    """Return a model whose parameters are frozen as the flags say."""
    if adapt_experts and adapters is None:
        raise ValueError("--adapt-experts: expected --adapters with it, which is missing")
    if frozen is not None and adapters is not None:
        raise ValueError(f"--frozen: expected no such flag with --adapters, which freezes all else, got {frozen}")
    if adapters is not None:
        return shape.with_adapters(parse_parameters(adapters), are_of_experts=adapt_experts)
    if frozen is not None:
        return shape.with_frozen_experts() if frozen == "experts" else shape.with_frozen_dense()
    return shape


def _refuse_others(options: argparse.Namespace) -> None:
    """Refuse flags that do not concern a model's memory."""
    defaults: dict[str, Any] = {"load": "uniform", "seed": 0, "domain_size": 1}
    kept = {*OWN, *SHARED, "command", "model", "nodes", "expert_slots", "min_replicas", "json"}
    for name, value in vars(options).items():
        if name not in kept and value not in (None, False, defaults.get(name)):
            raise ValueError(
                f"--{name.replace('_', '-')}: expected no such flag with --model, which defines these sizes itself"
            )


def parse_size(text: str) -> int:
    """Return the bytes that a text names.

        >>> parse_size("80GB"), parse_size("1.5 GiB")
        (80000000000, 1610612736)

    Raises:
        ValueError: not of this form, or below one byte.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([kmgt]?i?b)\s*", text, re.IGNORECASE)
    unit = UNITS.get(match[2].upper()) if match else None
    size = int(float(match[1]) * unit) if match and unit else 0
    if not 1 <= size < 1 << 60:
        raise ValueError(f"--memory: expected a size such as 80GB, 24GiB or 512MiB, got {text!r}")
    return size


def parse_parameters(text: str) -> int:
    """Return the number of parameters that a text names.

        >>> parse_parameters("3,407,872"), parse_parameters("13.6M")
        (3407872, 13600000)

    Raises:
        ValueError: not of this form, or below one.
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([kmb]?)\s*", text.replace(",", ""), re.IGNORECASE)
    number = int(float(match[1]) * COUNTS[match[2].upper()]) if match else 0
    if not 1 <= number < 1 << 48:
        raise ValueError(f"--adapters: expected a number of parameters such as 3407872 or 13.6M, got {text!r}")
    return number


def read_model(name: str) -> ModelShape:
    """Return the sizes of a known model, or of the model in a folder.

    Raises:
        ValueError: the name is unknown and no such folder, or the folder's model has no experts.
        ModuleNotFoundError: a folder is named, and transformers is not installed.
    """
    known = find_model(name)
    if known is not None:
        return known
    if not (Path(name) / "config.json").is_file():
        raise ValueError(
            f"--model: unknown model {name!r}; known are {', '.join(MODELS)}, and their names on the hub; for another "
            "one name a folder with its config.json of transformers, as `hf download` writes it"
        )
    from evermoe.integrations.transformers.hub_shape import read_shape

    return read_shape(name)


# ---- the answer


def plan_fit(setting: FitSetting) -> FitReport:
    """Compute the memory on the requested nodes, and search the fewest nodes."""
    found, fewest = footprint(setting.shape, setting.options), fewest_nodes(setting)
    ways = tuple(_ways(setting)) if fewest is None else ()
    return FitReport(setting, found, _peaks(setting, found), fewest, ways)


def _ways(setting: FitSetting) -> Iterator[tuple[str, int]]:
    """Yield the first combination of memory-saving flags with which the model fits."""
    options, flags = setting.options, list[str]()
    if not options.shard_optimizer and options.choices.protects_owners:
        options, flags = replace(options, shard_optimizer=True), ["--shard-optimizer"]
        tried = [(flags, options)]
    else:
        tried = []
    if options.expert_slots is None and options.choices.replicas(options.replication, options.min_replicas) == 1:
        tried.append(([*flags, "--expert-slots 1"], replace(options, expert_slots=1)))
    for each, chosen in tried:
        nodes = fewest_nodes(replace(setting, options=chosen))
        if nodes is not None:
            yield " ".join(each), nodes
            return


def _peaks(setting: FitSetting, found: Footprint) -> dict[PhaseName, tuple[str, Use]]:
    phases = {moment.phase for moment in found.moments}
    return {phase: found.peak(phase, setting.counted) for phase in PHASES if phase in phases}


def fewest_nodes(setting: FitSetting) -> int | None:
    """Return the fewest nodes on which every phase fits; None if there are none up to `MAX_NODES`."""
    for nodes in _candidates(setting):
        found = setting.on(nodes)
        if setting.is_on_gpu:  # copies are in host memory, which is not compared
            replicas = found.options.choices.replicas(found.options.replication, found.options.min_replicas)
            found = replace(found, options=replace(found.options, replication=0, min_replicas=replicas))
        try:
            peaks = _peaks(found, footprint(found.shape, found.options))
        except ValueError:  # too few slots for all experts
            continue
        if max(found.counted(use) for _, use in peaks.values()) <= setting.memory:
            return nodes
    return None


def _candidates(setting: FitSetting) -> Iterator[int]:
    """Yield numbers of nodes on which a worker's share, plus the gradients of a layer, would fit.

    With more workers than twice the experts only sharded parts shrink further, so some numbers are skipped.
    """
    per_node, nodes = setting.options.workers_per_node, 1
    while nodes <= min(MAX_NODES, MAX_WORKERS // per_node):
        if _least(setting.on(nodes)) <= setting.memory:
            yield nodes
        is_thin = nodes * per_node > 2 * setting.shape.experts
        if is_thin and not setting.options.shard_optimizer:
            return
        nodes += max(1, nodes // 16) if is_thin else 1


def _least(setting: FitSetting) -> int:
    """Return a lower bound of the bytes of the largest worker in a step."""
    shape, options = setting.shape, setting.options
    replicas = options.choices.replicas(options.replication, options.min_replicas)
    domains = [options.workers_per_node] * setting.nodes
    layer = (
        min(shape.experts, session_slots(shape.experts, domains, options.expert_slots, replicas))
        * shape.expert_parameters
    )
    owned = trained = shape.trained_dense_parameters
    if options.shard_optimizer:
        owned = max(shape.largest_module, owned // options.workers)
    layers = shape.layers - shape.frozen_layers
    held = shape.dense_parameters + trained + (shape.layers + layers) * layer
    least = held * options.weight_bytes + (owned + layers * layer) * options.optimizer_bytes
    return least + min(1, layers) * layer * options.weight_bytes


def fit_json(report: FitReport) -> dict[str, Any]:
    """Return everything, JSON-able; bytes are those of the largest worker."""
    setting = report.setting
    return {
        "evermoe": evermoe.__version__,
        "model": setting.name,
        "shape": vars(setting.shape) | {"parameters": setting.shape.parameters},
        "options": vars(setting.options),
        "memory": setting.memory,
        "device": "gpu" if setting.is_on_gpu else "cpu",
        "fits": report.fits,
        "needed": report.needed,
        "fewest_nodes": report.fewest_nodes,
        "ways": [{"flags": flags, "fewest_nodes": nodes} for flags, nodes in report.ways],
        "peaks": {
            phase: {"moment": moment, "counted": setting.counted(use), "share": use.share}
            | (use if setting.is_on_gpu else use._replace(network=0))._asdict()
            for phase, (moment, use) in report.peaks.items()
        },
    }
