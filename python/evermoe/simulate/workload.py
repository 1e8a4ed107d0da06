"""The trained model of a simulation: sizes of its units, and its step."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from evermoe.options import checked
from evermoe.planning.models import MODELS, ModelShape, find_model


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A model and its training step.

    Raises:
        ValueError: a field, what was expected and what came.
    """

    name: str
    layers: int
    """Number of MoE layers."""
    experts: int
    """Experts of each layer."""
    expert_parameters: int
    """Parameters of one expert."""
    dense_parameters: int
    """Dense parameters; every device has their weights."""
    largest_module: int = 0
    """Parameters of the largest dense module; 0 if unknown. With `shard_optimizer=True` it has one owner."""
    step_seconds: float
    """Seconds of a step on all nodes of the cluster, with an even load."""
    tokens_per_step: int = 1 << 20
    """Tokens of a global batch."""
    classes: int = 1
    """Classes of layers that differ in their load; layers of a class are placed and copied in the same way."""
    state_bytes: int = 14
    """Bytes of the state per parameter: bfloat16 weight, and float32 master and moments."""
    weight_bytes: int = 2
    """Bytes of the weight per parameter."""
    gradient_bytes: int = 2
    """Bytes of the gradient per parameter, as sent."""
    scaling: float = 1.0
    """A step of fewer nodes takes `(all / nodes) ** scaling` times as long: 1 if they do the others' work as well, 0
    if the time stays equal, below 0 if all share one machine, whose processors then have less to do."""
    expert_share: float = 0.5
    """Share of a step in which experts compute; an uneven load prolongs it."""
    network_idle: float = 0.5
    """Share of a step in which the network is idle: assumed; a profile of your own job measures it."""
    replayable: bool = True
    """Whether the optimizer's steps can be repeated bit by bit."""

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "experts",
            "expert_parameters",
            "dense_parameters",
            "largest_module",
            "tokens_per_step",
            "classes",
            "state_bytes",
            "weight_bytes",
            "gradient_bytes",
        ):
            checked(name, getattr(self, name), int, least=0)
        checked("step_seconds", self.step_seconds, float, above=0)

    @classmethod
    def of_shape(cls, name: str, shape: ModelShape, *, step_seconds: float, **options: float) -> Workload:
        """Return a workload with the sizes of a shape."""
        given: dict[str, object] = {
            "layers": shape.layers,
            "experts": shape.experts,
            "expert_parameters": shape.expert_parameters,
            "dense_parameters": shape.dense_parameters,
            "largest_module": shape.largest_module,
        }
        return cls(name=name, step_seconds=step_seconds, **(given | options))  # type: ignore[arg-type]

    @classmethod
    def preset(cls, name: str, *, step_seconds: float, **options: float) -> Workload:
        """Return a known model, by its name in `evermoe.planning.models.MODELS` or on the hub.

        Raises:
            ValueError: no model has the name.
        """
        shape = find_model(name)
        if shape is None:
            raise ValueError(f"model: expected a file or one of {', '.join(MODELS)}, got {name!r}")
        return cls.of_shape(name, shape, step_seconds=step_seconds, **options)

    @classmethod
    def read(cls, path: str | Path, **options: float) -> Workload:
        """Read a model from a JSON file with these fields; `options` take precedence.

        Raises:
            ValueError: the file describes no model. OSError: the file cannot be read.
        """
        try:
            data: Any = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path}: expected JSON: {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"{path}: expected an object with the fields of evermoe.simulate.Workload")
        given: dict[str, Any] = {"name": Path(path).stem} | data | options
        known = {each.name for each in fields(cls)}
        if unknown := sorted(set(given) - known):
            raise ValueError(f"{path}: expected fields of evermoe.simulate.Workload, got {unknown[0]!r}")
        try:
            return cls(**given)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.dense_parameters + self.layers * self.experts * self.expert_parameters
