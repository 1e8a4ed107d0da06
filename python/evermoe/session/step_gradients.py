"""The gradients of a step as `Session(on_gradients=...)` gets them: reduced, and not sent to replicas yet.

    backward ─ reduce ─ divide ─ [on_gradients] ─ [gradients to replicas] ─ VOTE ─ clip by max_grad_norm ─ update

Replicas repeat a step from the gradient that they receive and from the factor that follows from the vote. So other
changes of a gradient must come before it is sent, and must be the same on all members that train the same weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from evermoe.comm.group import Group
from evermoe.session import gradients
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit


class StepGradients:
    """The gradients of one step on one member: those of the mean loss over the global batch, not clipped yet.

    Iterating yields a name and a gradient, to be changed in place: for each parameter that is not an expert's its name
    in the model, and for each expert of this member the layer's path and the expert's number, such as `1.experts.7`,
    with all its weights in one dimension. Members that train the same weights must change them to the same bits: use
    nothing that depends on the rank, on the member's samples or on the global random generators.

        def on_gradients(gradients):
            for group in optimizer.param_groups:
                gradients.clip_norm_(group["params"], group["max_norm"])
            for name, gradient in gradients:
                gradient.add_(torch.randn(gradient.shape, generator=gradients.generator(name)), alpha=1e-3)

    Args:
        step: number of the step.
        seed: of the session.
        model: whose gradients they are.
        state: its units.
        group: of the members that train.
    """

    def __init__(self, step: int, seed: int, model: nn.Module, state: TrainingState, group: Group) -> None:
        self.step = step
        """Steps taken before this one. A step that a failure interrupts has the same number when it is repeated."""
        self._seed, self._model, self._state, self._group = seed, model, state, group

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the gradient of each parameter and expert here that has one."""
        dense = {id(parameter) for parameter in self._state.dense}
        for name, parameter in self._model.named_parameters():
            if id(parameter) in dense and parameter.grad is not None:
                yield name, parameter.grad
        for path, layer in self._state.layers.items():
            if layer.weights.grad is not None:
                yield from zip((expert_unit(path, e) for e in layer.ids), layer.weights.grad, strict=True)

    def generator(self, name: str) -> torch.Generator:
        """Return a generator on the gradients' device that is seeded from (seed, step, name): the same on all members.

        Args:
            name: of a gradient; any other text has numbers of its own.
        """
        digest = hashlib.sha256(f"{self._seed} {self.step} {name}".encode()).digest()
        (device,) = {p.device for p in self._model.parameters()}
        return torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") % 2**63)

    def norm(self, parameters: Iterable[Tensor] | None = None) -> float:
        """Return the norm of the gradients of some parameters over all members, each expert counted once; collective.

        All members must call it equally often, in the same order.

        Args:
            parameters: of the model, such as `optimizer.param_groups[0]["params"]`; None for all. Experts are those of
                a layer on all members, whichever of them are here.

        Raises:
            PeerLost: a member is gone; let it through.
        """
        of = None if parameters is None else list(parameters)
        squares = gradients.SquareSum(self._state, self._group.rank, self._group.size, of)
        (norms,) = gradients.read(squares.norms)
        total = self._group.all_reduce(torch.tensor([squares.value(norms)], dtype=torch.float64))
        return float(total) ** 0.5

    @torch.no_grad()
    def clip_norm_(self, parameters: Iterable[Tensor], max_norm: float) -> float:
        """Clip the gradients of some parameters by their norm over all members, in place; collective.

        As `torch.nn.utils.clip_grad_norm_` does it in a single process: above `max_norm` they are multiplied by
        `max_norm / (norm + 1e-6)`.

        Args:
            parameters: as of `norm`.
            max_norm: of them together.

        Returns:
            Their norm before.
        """
        parameters = list(parameters)
        norm = self.norm(parameters)
        if not norm <= max_norm:
            gradients.scale([p.grad for p in parameters if p.grad is not None], max_norm / (norm + 1e-6))
        return norm
