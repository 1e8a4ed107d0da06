"""Muon, which steps each matrix by an orthogonal one: also the matrices of each expert in a stack of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from evermoe.moe.expert import Expert
from evermoe.moe.experts import experts_by_stack
from evermoe.optim.masters import HALF, MasterOptimizer

_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_MAX_STEPS = 100


class Muon(MasterOptimizer):
    """`torch.optim.Muon` that steps each expert's matrices on their own.

    A drop-in replacement for matrices in float32: it has the same arguments, state names and `state_dict`, and the same
    bits, and each class can load the other's.

        matrices = [p for p in model.parameters() if p.dim() == 2 and p is not model.embedding.weight]
        others = [p for p in model.parameters() if all(p is not each for each in matrices)]
        optimizers = [evermoe.optim.Muon(matrices, lr=0.02), evermoe.optim.AdamW(others, lr=3e-4)]
        session = evermoe.Session(model, optimizers, sampler)

    A row of `evermoe.Experts.weights` holds the matrices of one expert. Each is stepped as a matrix of
    `[outputs, inputs]`, gate and up as two, whatever the expert's layout in memory. An expert's step does not depend on
    the other experts of the rank. The matrices of a step are multiplied in bfloat16 by torch, and these products may
    round differently on other hardware or with another number of threads. So sessions send the state rather than
    gradients, and workers that train the same matrices need the same hardware, software and number of threads.

    K. Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the adjustment of the learning
    rate "match_rms_adamw" is that of J. Liu et al., "Muon is Scalable for LLM Training", 2025.

    Args:
        params: matrices `[outputs, inputs]` and experts' weights `[e, row]`, or groups of them: contiguous; float32, or
            bfloat16 or float16, which get float32 masters in the state (`master_param`).
        lr: learning rate; a scheduler may change it, a tensor is read at each step.
        weight_decay: decoupled weight decay.
        momentum: factor of the previous momentum; that of the gradient is the rest of 1.
        nesterov: Nesterov momentum.
        ns_coefficients: of the polynomial of Newton and Schulz that makes a matrix orthogonal.
        eps: smallest norm by which a matrix is divided.
        ns_steps: times that the polynomial is applied, below 100.
        adjust_lr_fn: factor of the learning rate for a matrix `[A, B]`. "original" or None: `sqrt(max(1, A / B))`.
            "match_rms_adamw": `0.2 * sqrt(max(A, B))`, with which a learning rate for AdamW suits.

    Raises:
        ValueError: an option is out of range, a parameter is no matrix, or experts have biases, which are in the same
            parameter as their matrices.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        options |= {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        super().__init__(params, options)

    def _check_group(self, group: dict[str, Any]) -> None:
        _check_options(group)
        stacks = experts_by_stack()
        for number, parameter in enumerate(group["params"]):
            expert = stacks.get(id(parameter))
            if parameter.dim() != 2:
                raise ValueError(
                    f"params: expected matrices, got number {number} of the group with shape {tuple(parameter.shape)}: "
                    "give it to another optimizer, such as evermoe.optim.AdamW"
                )
            if expert is not None and expert.bias:
                raise ValueError(
                    f"params: number {number} of the group has the weights of experts with biases, which are no "
                    "matrices: give it to another optimizer, such as evermoe.optim.AdamW"
                )

    def _step(self, factor: float) -> None:
        if not 0 <= factor < math.inf:
            raise ValueError(f"factor: expected a finite number, 0 or more, got {factor}")
        for group in self.param_groups:
            _check_options(group)
            for parameter in group["params"]:
                _check_gradient(parameter)
        stacks = experts_by_stack()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_parameter(parameter, group, factor, stacks.get(id(parameter)))

    def _step_parameter(self, parameter: Tensor, group: dict[str, Any], factor: float, expert: Expert | None) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(
                parameter, dtype=torch.float32, memory_format=torch.contiguous_format
            )
        target = self._target(parameter)
        for p, buffer, gradient in _pieces(expert, target, state["momentum_buffer"], parameter.grad):
            _step_piece(p, buffer, gradient.float(), group, factor, expert)
        if target is not parameter:
            parameter.copy_(target)


def _pieces(expert: Expert | None, *tensors: Any) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tensors themselves, of a stack each expert's rows: its bits must not depend on the other rows."""
    yield from [tensors] if expert is None else zip(*tensors, strict=True)


def _step_piece(
    p: Tensor, buffer: Tensor, gradient: Tensor, group: dict[str, Any], factor: float, expert: Expert | None
) -> None:
    """Step a matrix, or an expert's row of them. The operations and their order are those of torch's Muon."""
    lr, momentum = float(group["lr"]), group["momentum"]
    if factor != 1:
        gradient = gradient * factor
    buffer.lerp_(gradient, 1 - momentum)
    update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
    p.mul_(1 - lr * group["weight_decay"])
    updates, matrices = ([update], [p]) if expert is None else (expert.matrices(update), expert.matrices(p))
    for each, matrix in zip(updates, matrices, strict=True):
        direction = orthogonalized(each, group["ns_coefficients"], group["ns_steps"], group["eps"])
        matrix.add_(direction, alpha=-lr * _adjustment(group["adjust_lr_fn"], *matrix.shape))


def orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return a matrix with the same singular vectors and singular values near 1, in bfloat16.

    Args:
        matrix: `[A, B]`.
        coefficients: of `a x + b x³ + c x⁵`, applied to the singular values.
        steps: times that it is applied.
        eps: smallest norm by which the matrix is divided.
    """
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(torch.bfloat16, copy=True)
    if is_tall:
        x = x.T
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def _adjustment(kind: str | None, outputs: int, inputs: int) -> float:
    if kind == "match_rms_adamw":
        return 0.2 * math.sqrt(max(outputs, inputs))
    return math.sqrt(max(1, outputs / inputs))


def _check_options(group: dict[str, Any]) -> None:
    for name in ("lr", "weight_decay", "momentum", "eps"):
        if not 0 <= float(group[name]) < math.inf:
            raise ValueError(f"{name}: expected a finite number, 0 or more, got {group[name]}")
    if group["adjust_lr_fn"] not in _ADJUSTMENTS:
        raise ValueError(f"adjust_lr_fn: expected one of {_ADJUSTMENTS}, got {group['adjust_lr_fn']!r}")
    if len(group["ns_coefficients"]) != 3:
        raise ValueError(f"ns_coefficients: expected three numbers, got {group['ns_coefficients']}")
    if not 0 <= group["ns_steps"] < _MAX_STEPS:
        raise ValueError(f"ns_steps: expected a whole number from 0 to {_MAX_STEPS - 1}, got {group['ns_steps']}")


def _check_gradient(parameter: Tensor) -> None:
    gradient = parameter.grad
    if gradient is not None and (gradient.is_sparse or gradient.dtype not in (torch.float32, *HALF)):
        raise RuntimeError(
            "evermoe.optim.Muon: expected dense gradients in float32, bfloat16 or float16, got one of shape "
            f"{tuple(gradient.shape)} in {gradient.dtype}, {gradient.layout}"
        )
