"""Models whose tensors are made where they live: `deferred`, and what a session does with such a model.

with evermoe.deferred(device="cuda"):
    model = Model()                                     # shapes, no memory
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
session = evermoe.Session(model, optimizer, sampler)    # experts are placed; then each rank makes what it holds
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from evermoe.errors import UnsupportedState
from evermoe.moe.experts import Experts, expert_layers
from evermoe.moe.module_paths import named_parts
from evermoe.optim.combined import each_of
from evermoe.state.building import Building
from evermoe.state.rebuild import Rebuild, own_random_numbers, seed_of
from evermoe.state.recording import Recording, View


@runtime_checkable
class WeightSource(Protocol):
    """Where the first weights of a deferred model come from: asked for one unit at a time, by a rank that holds it."""

    def describe(self) -> str:
        """Description of the weights, the same on all members."""

    def fill(self, path: str, module: nn.Module, tensors: Mapping[str, Tensor], expert: int | None) -> None:
        """Writes the first values of one unit.

        Args:
            path: of the module in the model; empty for the model itself.
            module: at that path.
            tensors: by name in the module, to be written: its own parameters and persistent buffers, or of an expert
                its row `weights`, `[row]`; on the session's device. A tied one occurs once, at its first name.
            expert: number of the expert, where the module is `evermoe.Experts`; else None.

        Raises:
            CorruptCopy: the source has no such tensors, or with other shapes.
        """


@runtime_checkable
class PartialSource(WeightSource, Protocol):
    """A source without the weights of some modules, which keep the values that their constructors drew."""

    def lacks(self, path: str, module: nn.Module) -> bool:
        """Returns whether the source has none of the weights of a module, which is no expert layer."""


Initializer = Callable[[nn.Module], None]
"""Writes a module's own parameters; of `evermoe.Experts`, of all experts in `weights`, which may be a single one."""


class _Built(NamedTuple):
    """A model that was built in `deferred`."""

    recording: Recording
    device: torch.device
    versions: dict[int, int]
    """Number of changes of each parameter at the end, by its identity."""


_built: weakref.WeakKeyDictionary[nn.Module, _Built] = weakref.WeakKeyDictionary()
"""Recorded constructions of each module with parameters."""


@contextmanager
def deferred(*, device: torch.device | str | None = None, seed: int = 0) -> Iterator[None]:
    """Builds models without memory: a `Session` makes on each rank only the tensors that this one holds.

        with evermoe.deferred():
            model = Model()

    What the constructors do to tensors is recorded, and done to each where it is made: the same bits on any rank and
    any number of ranks. So initialise inside the block whatever you do not leave to the constructors. Small tensors are
    made at once, as constructors read them; they get the recorded values, too.

    Args:
        device: where the session makes the model; default: torch's default device.
        seed: of all random numbers in the block.
    """
    recording, modules = Recording(seed), list[nn.Module]()
    target = torch.get_default_device() if device is None else torch.device(device)
    hook = register_module_parameter_registration_hook(lambda module, name, parameter: modules.append(module))
    try:
        with Building(recording):
            yield
    finally:
        hook.remove()
    parameters = [parameter for module in modules for parameter in module.parameters(recurse=False)]
    for parameter in parameters:
        recording.note_constant(parameter)
    recording.prune(parameters)
    versions = {id(parameter): parameter._version for parameter in parameters}
    for module in modules:
        _built[module] = _Built(recording, target, versions)


class Deferral:
    """Recipe for the tensors of a deferred model.

    Once made, the parameters have no rows on their device, `[0, ...]`: what has a value later is in `shapes`.

    Args:
        model: built in `deferred`, or on the `meta` device.
        source: of its weights; None for the constructors' own.

    Raises:
        UnsupportedState: a part was built otherwise or changed since, or its buffers have no values.
    """

    def __init__(self, model: nn.Module, source: WeightSource | Initializer | None) -> None:
        built = [_built[module] for module in model.modules() if module in _built]
        self._built = built[0] if built else None
        self.device = self._built.device if self._built else torch.get_default_device()
        self._source, self.is_made = source, False
        """Whether the parameters have their full shape."""
        self._modules = dict(named_parts(model))
        named = dict(model.named_parameters())
        for name, parameter in named.items():
            self._check(name, parameter)
        self._check_ways()
        self._origins = {id(parameter): View.of(parameter) for parameter in named.values()} if built else {}
        """Where each parameter was in the recording, by its identity."""
        layers = expert_layers(model)
        self._stacks = {path: View.of(layer.weights) for path, layer in layers.items()} if built else {}
        self.shapes = {id(parameter): tuple(parameter.shape) for parameter in named.values()}
        """Shape of each parameter once it is made, by its identity."""
        for layer in layers.values():
            layer.ids = []
        for parameter in named.values():
            self._set(parameter, [0, *parameter.shape[1:]] if parameter.dim() else [])
        self._make_buffers()
        for module in self._modules.values():
            _built.pop(module, None)

    def _check(self, name: str, parameter: nn.Parameter) -> None:
        if self._built is None:
            if not parameter.is_meta:
                raise UnsupportedState(f"{name} is on {parameter.device}, but other parameters are on meta: {_INSIDE}")
            return
        recording, _, versions = self._built
        if not recording.knows(parameter):
            raise UnsupportedState(f"{name} was not made in evermoe.deferred(), like others of the model: {_INSIDE}")
        if versions.get(id(parameter)) != parameter._version:
            raise UnsupportedState(f"{name} was changed after evermoe.deferred(), where it has no values: {_INSIDE}")

    def _check_ways(self) -> None:
        """Of a model on `meta`: whether all modules can be initialised."""
        if self._built is not None or self._source is not None:
            return
        for path, module in self._modules.items():
            if next(module.parameters(recurse=False), None) is not None and not hasattr(module, "reset_parameters"):
                raise UnsupportedState(
                    f"{path or 'the model'} ({type(module).__name__}) has parameters on meta and no "
                    "reset_parameters(): build it in evermoe.deferred(), or give the session weights="
                )

    def _make_buffers(self) -> None:
        """Gives buffers, and other tensors that modules hold, memory on the device."""
        for path, module in self._modules.items():
            places: tuple[dict[str, Any], ...] = module._buffers, module.__dict__
            for place in places:
                for name, tensor in place.items():
                    if isinstance(tensor, Tensor):
                        place[name] = self._made(f"{path}.{name}" if path else name, tensor, module, name)

    def _made(self, path: str, tensor: Tensor, module: nn.Module, name: str) -> Tensor:
        if not tensor.is_meta:
            return tensor.to(self.device)
        if self._built is not None and self._built.recording.knows(tensor):
            return Rebuild(self._built.recording).value(tensor).to(self.device)
        if name not in module._buffers:
            return tensor  # of a model on `meta`: what its forward needs of these, it sets
        if name in module._non_persistent_buffers_set:
            raise UnsupportedState(f"{path} has no values, and no source of weights has it: {_INSIDE}")
        return torch.empty_like(tensor, device=self.device)

    # ---- tensors

    def describe(self) -> str:
        """Where the first weights come from, the same on all members."""
        if isinstance(self._source, WeightSource):
            return self._source.describe()
        if self._source is not None:
            return f"initialised by {getattr(self._source, '__qualname__', type(self._source).__name__)}"
        return f"built with seed {self._built.recording.seed}" if self._built else "reset_parameters"

    def make(self, parameters: Iterable[Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Gives parameters memory of their full shape, and the optimizer's state of them zeros, as it starts.

        In place: references to a parameter stay valid.
        """
        self.is_made = True
        for parameter in parameters:
            self._set(parameter, self.shapes[id(parameter)])
            state = optimizer.state.get(parameter, {})
            for key, tensor in state.items():
                if isinstance(tensor, Tensor) and tensor.dim():
                    state[key] = tensor.new_zeros(parameter.shape)

    def _set(self, parameter: Tensor, shape: Any) -> None:
        new = torch.empty(shape, dtype=parameter.dtype, device=self.device)
        torch.utils.swap_tensors(parameter, nn.Parameter(new, parameter.requires_grad))

    @torch.no_grad()
    def fill_dense(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Writes the first values of a unit that is not an expert: its parameters, made before, and buffers."""
        module = self._modules.get(name)
        path = name if module is not None else ""
        module = self._modules[path]
        is_lacking = isinstance(self._source, PartialSource) and self._source.lacks(path, module)
        if isinstance(self._source, WeightSource) and not is_lacking:
            self._source.fill(path, module, tensors, None)
        elif self._built is None or not (self._source is None or is_lacking):
            self._initialize(name, module, tensors)
        else:
            for tensor in tensors.values():
                if id(tensor) in self._origins:
                    self._repeat(self._origins[id(tensor)], tensor)

    def _repeat(self, origin: View, tensor: Tensor) -> None:
        assert self._built is not None
        is_here = tensor.device.type == "cpu" and View.of(tensor)[1:] == origin[1:]
        given = {origin.memory: tensor.untyped_storage()} if is_here else {}
        value = Rebuild(self._built.recording, given).values([origin])[0]
        if not is_here:
            tensor.copy_(value)

    @torch.no_grad()
    def fill_expert(self, path: str, layer: Experts, expert: int, row: Tensor) -> None:
        """Writes the first weights of an expert of the layer at `path` to its `row`, `[row]`."""
        if isinstance(self._source, WeightSource):
            self._source.fill(path, layer, {"weights": row}, expert)
        elif self._source is not None or self._built is None:
            self._initialize(f"{path}.{expert}", layer, {"weights": row[None]})
        else:
            here = torch.empty(row.shape, dtype=row.dtype) if row.device.type != "cpu" else row
            Rebuild(self._built.recording).write_row(self._stacks[path], expert, here)
            if here is not row:
                row.copy_(here)

    def _initialize(self, unit: str, module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
        """Runs a module's initialiser on the CPU, whose random numbers are the same everywhere."""
        own: tuple[dict[str, Any], ...] = module._parameters, module._buffers
        kept = [dict(place) for place in own]
        scratch = {name: tensor.cpu() for name, tensor in tensors.items()}
        is_given = self._source is not None and not isinstance(self._source, WeightSource)
        initialize = self._source if is_given else getattr(type(module), "reset_parameters", None)
        try:
            for name, tensor in kept[0].items():
                if tensor is not None:
                    here = scratch[name].detach() if name in scratch else torch.empty_like(tensor, device="cpu")
                    own[0][name] = nn.Parameter(here, tensor.requires_grad)
            own[1].update({name: each for name, each in scratch.items() if name in own[1]})
            if initialize is not None:
                with own_random_numbers(seed_of(self._built.recording.seed if self._built else 0, unit)):
                    initialize(module)  # type: ignore[operator]
            for name, tensor in tensors.items():
                found = own[0][name] if name in own[0] else own[1][name]
                if found.data_ptr() != tensor.data_ptr():
                    tensor.copy_(found)
        finally:
            for place, before in zip(own, kept, strict=True):
                place.update(before)


_INSIDE = "build and initialise the complete model in `with evermoe.deferred():`"


def find_deferral(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    source: WeightSource | Initializer | None = None,
) -> Deferral | None:
    """Find the recipe of a model that has no values yet; None for one that has.

    Raises:
        ValueError: `source` is given for a model that has values.
        UnsupportedState: as of `Deferral`; or the optimizer has state already.
    """
    is_built = any(module in _built for module in model.modules())
    if is_built or any(parameter.is_meta for parameter in model.parameters()):
        for each in each_of(optimizer):
            if any(each.state.values()):
                raise UnsupportedState(
                    f"{type(each).__name__} has state of parameters that have no values yet: expected an optimizer "
                    "that makes its state in its first step, such as torch.optim.AdamW(fused=True)"
                )
        return Deferral(model, source)
    if source is not None:
        raise ValueError("weights is for a model that is built in evermoe.deferred() or on meta: this one has values")
    return None
