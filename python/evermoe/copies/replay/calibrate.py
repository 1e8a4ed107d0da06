"""Find the arithmetic that an optimizer follows, so that its steps can be repeated bit for bit elsewhere.

A replica that has the state before a step, the gradient and the step's numbers can take the step itself, so the new
state need not be sent. That only holds if the replica rounds as the trainer's optimizer does. `calibrate` tries it
before anything relies on it:

    arithmetic = evermoe.copies.replay.calibrate(optimizer)          # raises NotReplayable, with the reason
    row = arithmetic.numbers(group, t, device=p.device)       # on the trainer, in each step
    repeat_tensor_steps(p, state, [gradient], row[None])      # on the replica, on any device
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from evermoe.errors import NotReplayable
from evermoe.ops.optim import adamw_, adamw_step, sgd_, sgd_step
from evermoe.optim.masters import HALF, MASTER, takes_factor
from evermoe.options import count

SGD_NUMBERS, ADAMW_NUMBERS = 9, 10
"""Length of the row of a step's numbers."""
_STATE = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
_ARITHMETICS = {
    "adamw": ("evermoe", "torch_cpu_fused", "torch_cuda_fused", "torch_cuda_foreach"),
    "sgd": ("evermoe", "torch_cpu_fused"),
}
_SIZES = (1, 71, 70_003)
_STEPS = 8
_SUBNORMAL = slice(7, None, 11)
_MIN_LR = 1e-8  # below it the trial uses _TRIAL_LR: a rate of 0 hides how the parameters are rounded
_TRIAL_LR = 1e-3
_LATE = 5, 9_000  # the step before which steps are skipped, and their number: late steps have other bias corrections
_INSTEAD = (
    "send the optimizer's full state instead of gradients, or train with torch's AdamW or SGD with fused=True, "
    "or with evermoe.optim.AdamW or SGD"
)


@dataclass(frozen=True)
class Arithmetic:
    """Rule and order of roundings with which an optimizer's steps are repeated.

    Attributes:
        rule: "adamw" or "sgd".
        variant: the order of its roundings, the `arithmetic` of `ops.adamw_step` or `ops.sgd_step`.
    """

    rule: str
    variant: str

    def numbers(
        self,
        group: Mapping[str, Any],
        t: int,
        *,
        device: torch.device | str = "cpu",
        loss_scale: float = 1.0,
        clip: float = 1.0,
    ) -> Tensor:
        """Compute the numbers of one step of a parameter on the trainer, from the current options of its group.

        Args:
            group: one of the optimizer's `param_groups`.
            t: number of the parameter's step, from 1.
            device: the parameter's device on the trainer; "torch_cuda_fused" computes powers on it and waits for it.
            loss_scale: divisor that the optimizer itself applies to the gradient.
            clip: factor that is applied to the gradient after it was logged, before the optimizer sees it.

        Returns:
            float32 `[10]` (AdamW) or `[9]` (SGD) on the CPU.

        Raises:
            ValueError: an option is out of its range.
        """
        shared: dict[str, Any] = {"loss_scale": loss_scale, "clip": clip, "arithmetic": self.variant}
        shared |= {name: float(group[name]) for name in ("lr", "weight_decay")}
        shared["maximize"] = bool(group.get("maximize", False))
        if self.rule == "sgd":
            shared |= {name: float(group[name]) for name in ("momentum", "dampening")}
            return sgd_step(is_first=t == 1, nesterov=bool(group["nesterov"]), **shared)
        betas = float(group["betas"][0]), float(group["betas"][1])
        if self.variant == "torch_cuda_fused":
            shared["powers"] = powers(betas, t, device)
        return adamw_step(t=t, betas=betas, eps=float(group["eps"]), **shared)


def repeat_tensor_steps(
    p: Tensor,
    state: Mapping[str, Tensor],
    gradients: Sequence[Tensor | None],
    steps: Tensor,
    rounded: Tensor | None = None,
) -> None:
    """Repeat steps in place with `ops.adamw_` or `ops.sgd_`; the state is by torch's names.

    Args:
        p: parameters before the steps, as those functions take them.
        state: "exp_avg" and "exp_avg_sq", or "momentum_buffer" if there is momentum.
        gradients: one for each step; None for zeros.
        steps: float32 `[len(gradients), 10 or 9]`: rows from `Arithmetic.numbers`.
        rounded: the parameters that `p` is the float32 master of; None without one.

    Raises:
        KeyError: an array of AdamW's state is missing.
        RuntimeError: an argument does not match its description. Nothing was changed.
    """
    if steps.shape[1] == SGD_NUMBERS:
        sgd_(p, state.get("momentum_buffer"), gradients, steps, rounded)
    else:
        adamw_(p, state["exp_avg"], state["exp_avg_sq"], gradients, steps, rounded)


Arithmetics = Mapping[torch.optim.Optimizer, Arithmetic]
"""Of those of a session's optimizers whose steps can be repeated."""


def powers(betas: tuple[float, float], t: int, device: torch.device | str) -> tuple[float, float]:
    """Compute `beta**t` in float32 as torch's fused AdamW does on a CUDA device.

    Fused AdamW calls CUDA's `powf`, which is not correctly rounded, so no other library returns the same bits. This
    function calls `torch.pow` on float32 tensors on the device, which uses the same `powf`. `calibrate` confirms that
    for the installed torch and GPU. Waits for the device.

    Args:
        betas: as of AdamW.
        t: number of the step, from 1.
        device: the trainer's CUDA device.

    Raises:
        ValueError: the device is not a CUDA device.
    """
    if torch.device(device).type != "cuda":
        raise ValueError(f"device: expected the trainer's CUDA device, whose powf rounds in its own way, got {device}")
    base = torch.tensor(betas, dtype=torch.float32, device=device)
    first, second = torch.pow(base, torch.full_like(base, t)).tolist()
    return first, second


def calibrate(optimizer: torch.optim.Optimizer) -> Arithmetic:
    """Find the arithmetic that repeats the optimizer's steps, by trying it on scratch tensors.

    A second optimizer of the same class, with the options of each group, takes some steps on tensors of odd sizes, with
    subnormal, huge and zero gradients, on the devices of the parameters. The result is the arithmetic that reproduces
    all its bits, state included. The parameters, gradients and state of the optimizer itself are neither read nor
    written, and its hooks are not called. A learning rate near 0, as at the start of a warm-up, is tried as 1e-3.

    Call it when training starts, and again when torch, the GPU or the kind of options changes. It does not cover a step
    that `torch.compile` rewrote, nor changes to the gradients before the step.

    Args:
        optimizer: a `torch.optim.Optimizer` with the options of AdamW (or Adam without weight decay) or SGD.

    Raises:
        NotReplayable: no arithmetic matches; the message says why and what to do instead.
    """
    _check_options(optimizer)
    rule = "adamw" if "betas" in optimizer.param_groups[0] else "sgd"
    scratch = _second(optimizer)
    candidates = {name: Arithmetic(rule, name) for name in _ARITHMETICS[rule]}
    devices = {parameter.device.type for group in scratch.param_groups for parameter in group["params"]}
    if devices != {"cuda"}:
        candidates.pop("torch_cuda_fused", None)
    trials = [_Trial(arithmetic, scratch) for arithmetic in candidates.values()]
    matching = trials
    random = torch.Generator().manual_seed(0)
    for step in range(_STEPS):
        if step == _LATE[0]:
            _skip_steps(scratch, matching, _LATE[1])
        for group in scratch.param_groups:
            for parameter in group["params"]:
                parameter.grad = _gradient(step, parameter.numel(), random).to(parameter.device, parameter.dtype)
        for trial in matching:
            trial.take_step()
        try:
            scratch.step()
        except Exception as error:
            raise NotReplayable(
                f"a trial step of a second {type(optimizer).__name__} failed: {error}; {_INSTEAD}"
            ) from error
        _check_masters(scratch)
        for trial in matching:
            trial.count_differences()
        matching = [trial for trial in matching if not trial.num_differing]
        if not matching:
            raise NotReplayable(_reason(optimizer, trials))
    return matching[0].arithmetic


def _check_options(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    for group in optimizer.param_groups:
        if "ns_steps" in group:
            raise NotReplayable(f"{name} multiplies matrices, whose products round differently on other hardware")
        known = {"betas", "eps"} <= group.keys() or {"momentum", "dampening", "nesterov"} <= group.keys()
        if not known or not {"lr", "weight_decay"} <= group.keys():
            raise NotReplayable(f"{name} has neither the options of AdamW nor those of SGD; {_INSTEAD}")
        if ("betas" in group) != ("betas" in optimizer.param_groups[0]):
            raise NotReplayable(f"{name} mixes groups with the options of AdamW and of SGD; {_INSTEAD}")
        if group.get("amsgrad"):
            raise NotReplayable(f"{name} has amsgrad=True, which keeps a third moment; {_INSTEAD}")
        for parameter in group["params"]:
            if parameter.dtype not in (torch.float32, *HALF):
                raise NotReplayable(f"{name} steps parameters in {parameter.dtype}, not float32; {_INSTEAD}")
    if not any(group["params"] for group in optimizer.param_groups):
        raise NotReplayable(f"{name} has no parameters yet; call calibrate once it has some")


def _second(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Create an optimizer of the same class, with the same options, for scratch tensors."""
    kind = type(optimizer)
    groups = [_scratch_group(group) for group in optimizer.param_groups]
    accepted = inspect.signature(kind.__init__).parameters
    defaults = {name: _own(value) for name, value in optimizer.defaults.items() if name in accepted}
    try:
        second = kind(groups, **defaults)
    except Exception as error:
        raise NotReplayable(f"a second {kind.__name__} cannot be created: {error}; {_INSTEAD}") from error
    for name, value in vars(optimizer).items():
        if not name.startswith("_") and isinstance(value, bool | float | str) and vars(second).get(name) != value:
            raise NotReplayable(
                f"{kind.__name__} was created with {name}={value}, which its groups do not contain, so a second one "
                f"cannot be created with the same options; {_INSTEAD}"
            )
    return second


def _scratch_group(group: Mapping[str, Any]) -> dict[str, Any]:
    random = torch.Generator().manual_seed(1)
    kinds = {(parameter.device, parameter.dtype) for parameter in group["params"]}
    scratch = [
        torch.nn.Parameter(_parameters(size, random).to(*kind)) for kind in sorted(kinds, key=str) for size in _SIZES
    ]
    options = {name: _own(value) for name, value in group.items() if name not in ("params", "param_names")}
    return options | {"params": scratch, "lr": _trial_lr(options["lr"])}


def _trial_lr(lr: Any) -> Any:
    """Return the learning rate, or `_TRIAL_LR` at the start of a warm-up; a tensor stays a tensor."""
    if not 0 <= float(lr) < _MIN_LR:
        return lr
    return torch.full_like(lr, _TRIAL_LR) if isinstance(lr, Tensor) else _TRIAL_LR


def _own(value: Any) -> Any:
    """Return a copy of a value that could be changed in place, such as a learning rate in a tensor."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _parameters(size: int, random: torch.Generator) -> Tensor:
    """Return normal values, with zeros of both signs and subnormals."""
    values = torch.randn(size, generator=random)
    values[3::11] = 0.0
    values[5::11] = -0.0
    values[_SUBNORMAL] = _subnormal(values[_SUBNORMAL].numel(), random)
    return values


def _gradient(step: int, size: int, random: torch.Generator) -> Tensor:
    """Return a gradient of this step's kind: normal, of any magnitude, subnormal, or with zeros of both signs.

    It is subnormal in every step where `_parameters` are, so that they stay subnormal.
    """
    values = torch.randn(size, generator=random)
    kinds: list[Callable[[Tensor], Tensor]] = [
        lambda values: values * 1e-3,
        lambda values: values * torch.exp(48 * torch.rand(size, generator=random) - 40),
        lambda values: values * 2.0**-128,
        _with_zeros,
    ]
    values = kinds[step % len(kinds)](values)
    values[_SUBNORMAL] = _subnormal(values[_SUBNORMAL].numel(), random)
    return values


def _subnormal(size: int, random: torch.Generator) -> Tensor:
    """Return subnormal values of both signs, by their bits: `torch.set_flush_denormal` makes products zero."""
    bits = torch.randint(1, 1 << 22, (size,), generator=random, dtype=torch.int32)
    bits[::2] |= -(1 << 31)
    return bits.view(torch.float32)


def _with_zeros(values: Tensor) -> Tensor:
    values[::3] = 0.0
    values[1::5] = -0.0
    return values


def _check_masters(scratch: torch.optim.Optimizer) -> None:
    """Check that half-precision parameters have the float32 masters of `evermoe.optim`, whose steps are repeated.

    Its optimizers multiply such gradients by the clip factor in float32, as a replica does. A pass over the gradients,
    which other optimizers need, would round the products.
    """
    for parameter in (each for group in scratch.param_groups for each in group["params"]):
        if parameter.dtype in HALF and not takes_factor(scratch):
            raise NotReplayable(
                f"{type(scratch).__name__} steps parameters in {parameter.dtype}, not float32, and has no float32 "
                f"{MASTER} of evermoe.optim; {_INSTEAD}"
            )


class _Trial:
    """One candidate arithmetic: steps copies of the scratch parameters with our ops until a bit differs."""

    def __init__(self, arithmetic: Arithmetic, scratch: torch.optim.Optimizer) -> None:
        self.arithmetic = arithmetic
        self.scratch = scratch
        self.t = 0
        self.num_differing = 0
        self.first_differing = ""
        self.ours = {
            parameter: {
                "p": parameter.detach().to(torch.float32, copy=True),
                **{name: torch.zeros_like(parameter, dtype=torch.float32) for name in _STATE[arithmetic.rule]},
            }
            for group in scratch.param_groups
            for parameter in group["params"]
        }

    def _parameters(self) -> Iterable[tuple[Mapping[str, Any], Tensor]]:
        return ((group, parameter) for group in self.scratch.param_groups for parameter in group["params"])

    def take_step(self) -> None:
        """Take the next step, before the scratch optimizer does: it may change the gradients."""
        self.t += 1
        for group, parameter in self._parameters():
            ours = self.ours[parameter]
            try:
                row = self.arithmetic.numbers(group, self.t, device=parameter.device)
            except ValueError as error:
                raise NotReplayable(f"{type(self.scratch).__name__}: {error}; {_INSTEAD}") from error
            gradient = None if parameter.grad is None else parameter.grad.to(torch.float32, copy=True)
            repeat_tensor_steps(ours["p"], ours, [gradient], row[None])

    def count_differences(self) -> None:
        """Count the words that differ, except in state that the optimizer does not keep."""
        for group, parameter in self._parameters():
            kept = self.scratch.state[parameter]
            theirs = {"p": kept[MASTER] if parameter.dtype in HALF else parameter.detach()} | kept
            for name, ours in self.ours[parameter].items():
                if name == "momentum_buffer" and group["momentum"] == 0:
                    continue
                other = theirs.get(name)
                differing = _num_differing(ours, other) if isinstance(other, Tensor) else ours.numel()
                if name == "p" and parameter.dtype in HALF:
                    differing += _num_differing(ours.to(parameter.dtype).float(), parameter.detach().float())
                if differing and not self.num_differing:
                    self.first_differing = name
                self.num_differing += differing


def _num_differing(one: Tensor, two: Tensor) -> int:
    """Return the number of words whose bits differ; NaN equals NaN."""
    if two.dtype != torch.float32 or one.shape != two.shape:
        return one.numel()
    bits, other_bits = one.view(torch.int32), two.contiguous().view(torch.int32)
    if torch.equal(bits, other_bits):
        return 0
    nan = one.isnan() & two.isnan()
    return int((~nan & (bits != other_bits)).sum())


def _skip_steps(scratch: torch.optim.Optimizer, trials: list[_Trial], number: int) -> None:
    """Advance the step count of the scratch optimizer, if it is a tensor of its state, and those of the trials."""
    counters = [state.get("step") for state in scratch.state.values()]
    if counters and all(isinstance(counter, Tensor) for counter in counters):
        for counter in counters:
            counter.add_(number)
        for trial in trials:
            trial.t += number


def _reason(optimizer: torch.optim.Optimizer, trials: list[_Trial]) -> str:
    nearest = max(trials, key=lambda trial: (trial.t, -trial.num_differing))
    tried = ", ".join(trial.arithmetic.variant for trial in trials)
    if type(optimizer) is torch.optim.AdamW and not optimizer.defaults.get("fused"):
        return (
            f"another process cannot repeat the steps of torch's AdamW without fused=True bit for bit "
            f"(compared with {tried}: step {nearest.t} differs in {count(nearest.num_differing, 'word')}, first in "
            f"{nearest.first_differing}); {_INSTEAD}"
        )
    return (
        f"{type(optimizer).__name__} rounds like none of the arithmetics {tried}. {nearest.arithmetic.variant} is the "
        f"nearest: step {nearest.t} differs in {count(nearest.num_differing, 'word')}, first in "
        f"{nearest.first_differing}. Its formula may differ, or it is compiled with fast math or takes roots "
        f"from a library that does not round them correctly; {_INSTEAD}"
    )
