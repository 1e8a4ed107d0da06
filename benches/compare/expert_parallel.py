"""Traditional expert parallelism: fixed groups of P ranks that together hold all experts, as in DeepSpeed-MoE.

Rank r is at position r mod P of group r // P. Each group computes its own samples with its own copy of the experts; the
gradients of an expert are summed over the ranks at its position, all others over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benches.compare.gloo_group import GlooGroup
from benches.compare.program import MAX_GRAD_NORM
from evermoe.comm.collectives import sum_flat
from evermoe.moe.experts import expert_layers
from evermoe.session.gradients import norms

MOMENTS = ("exp_avg", "exp_avg_sq")


class ExpertParallel:
    """A model on fixed expert-parallel groups, and its training step with AdamW.

    Args:
        model: model with `evermoe.Experts`, the same on all ranks; at first it has all experts.
        optimizer: optimizer of its parameters.
        size: P, the ranks of a group, a divisor of the number of experts.
        limit: seconds for which a collective waits for a silent peer.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, size: int, limit: float) -> None:
        self._model, self._optimizer, self.size = model, optimizer, size
        self._limit = timedelta(seconds=limit)
        self._layers = expert_layers(model)
        experts = {id(layer.weights) for layer in self._layers.values()}
        self._dense = {name: p for name, p in model.named_parameters() if id(p) not in experts}
        self.position: int | None = None
        self.world, self._inner, self._across = (GlooGroup() for _ in range(3))
        self.world.linked = [self._inner, self._across]
        self._inner.linked = [self.world, self._across]
        self._across.linked = [self.world, self._inner]
        for layer in self._layers.values():
            layer.group = self._inner

    def hold(self, position: int) -> None:
        """Keep the experts of one position on this rank, with their first weights until others arrive."""
        is_first = self.position is None
        self.position = position
        for layer in self._layers.values():
            each = layer.num_experts // self.size
            layer.ids = list(range(position * each, (position + 1) * each))
            layer.matrix_RE = np.repeat(np.eye(self.size, dtype=np.int64), each, axis=1)
            if is_first:
                layer.weights.data = layer.weights.data[layer.ids].clone()
        if is_first:
            self._make_state()

    def _make_state(self) -> None:
        for parameter in self._model.parameters():
            zeros = {name: torch.zeros_like(parameter) for name in MOMENTS}
            self._optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}

    def connect(self, store: dist.Store, rank: int, world: int) -> None:
        """Connect the ranks of all groups; `store` has a prefix that no other set of ranks uses."""
        position, number = rank % self.size, rank // self.size
        places = (
            (self.world, "world", rank, world),
            (self._inner, f"group-{number}", position, self.size),
            (self._across, f"position-{position}", number, world // self.size),
        )
        for group, prefix, mine, size in places:
            group.rebuild(dist.PrefixStore(prefix, store), mine, size, torch.device("cpu"), self._limit)

    def set_step(self, step: int) -> None:
        """Set the number of steps in the state, as the optimizer counts them."""
        for parameter in self._model.parameters():
            self._optimizer.state[parameter]["step"].fill_(step)

    def entries(self) -> dict[str, Tensor]:
        """Return the state by location-independent names: every parameter, each expert on its own, and moments."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._dense.items():
            found |= {f"{name}.{part}": tensor for part, tensor in self._parts(parameter).items()}
        for path, layer in self._layers.items():
            for part, rows in self._parts(layer.weights).items():
                found |= {f"{path}.{expert}.{part}": row for expert, row in zip(layer.ids, rows, strict=True)}
        return found

    def tensors(self, *, experts: bool) -> list[Tensor]:
        """Return the state of this position's experts, or all other state, in an order that is equal on all ranks."""
        chosen = [layer.weights for layer in self._layers.values()] if experts else list(self._dense.values())
        return [tensor for parameter in chosen for tensor in self._parts(parameter).values()]

    def _parts(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = self._optimizer.state[parameter]
        return {"weights": parameter.data, **{name: state[name] for name in MOMENTS}}

    def step(self, loss_of: Callable[[], Tensor], weight: float, notes: Tensor) -> float:
        """Take one step of training; collective.

        Args:
            loss_of: function that computes this rank's mean loss.
            weight: this rank's share of the global batch.
            notes: float64 `[n]`, summed in place over all ranks before any update.

        Returns:
            The mean loss of the global batch.

        Raises:
            PeerLost: a rank is lost; this rank has updated nothing.
        """
        self._optimizer.zero_grad()
        part = loss_of() * weight
        part.backward()
        return self.update(part, notes)

    def update(self, part: Tensor, notes: Tensor) -> float:
        """Reduce the gradients and step the optimizer, after backward of this rank's `part` of the loss; as `step`."""
        self._reduce()
        sums = self.world.all_reduce(torch.cat([part.detach().double().reshape(1), notes]))
        notes.copy_(sums[1:])
        clip(self._gradients(), self._squares() ** 0.5, MAX_GRAD_NORM)
        self._optimizer.step()
        return float(sums[0])

    def _reduce(self) -> None:
        _sum(list(self._dense.values()), self.world)
        _sum([layer.weights for layer in self._layers.values()], self._across)

    def _gradients(self) -> list[Tensor]:
        return [p.grad for p in self._model.parameters() if p.grad is not None]

    def _squares(self) -> float:
        """Return the square of the global gradient's norm."""
        dense = norms([p.grad for p in self._dense.values() if p.grad is not None]).square().sum()
        experts = norms([layer.weights.grad for layer in self._layers.values() if layer.weights.grad is not None])
        total = self._inner.all_reduce(experts.square().sum().reshape(1))
        return float(dense + total[0])

    def drop(self, reason: str) -> None:
        """Leave all groups, so that no peer waits for this rank."""
        self.world.drop(reason)


def _sum(parameters: list[nn.Parameter], group: GlooGroup) -> None:
    """Sum the gradients of parameters over a group; collective."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    if gradients and group.size > 1:
        flat = torch.cat([each.reshape(-1) for each in gradients])
        sum_flat(flat, group)
        parts = flat.split([each.numel() for each in gradients])
        torch._foreach_copy_(gradients, [part.view_as(each) for part, each in zip(parts, gradients, strict=True)])


def clip(gradients: list[Tensor], norm: float, limit: float) -> None:
    """Clip gradients with this global norm to the limit, as `torch.nn.utils.clip_grad_norm_` does."""
    if norm > limit:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))
