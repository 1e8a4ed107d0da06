"""Script code that runs in `optimizer.step()`: a replica that repeats the optimizer's steps does not run it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import lr_scheduler
from torch.optim import optimizer as torch_optimizer

from evermoe.errors import UnsupportedState
from evermoe.planning.presets import PRESETS


def foreign_step(optimizer: torch.optim.Optimizer) -> str | None:
    """Name the `step` of the optimizer's class if it is neither torch's nor evermoe's; None if it is."""
    step = inspect.unwrap(type(optimizer).step)
    return None if _is_known(step) else f"{type(optimizer).__name__}.step of {_module(step)}"


def foreign_code(optimizer: torch.optim.Optimizer) -> str | None:
    """Name the first code that a step of the optimizer runs and that is neither torch's nor evermoe's; None without.

    This covers hooks of the optimizer and of all optimizers, a `step` of the instance's own, and the class's. Torch's
    schedulers put a `step` of theirs on the instance, which calls the class's.
    """
    return next(_foreign(optimizer), None)


def refuse_foreign_code(found: str | None) -> None:
    """Refuse code that changes a step after its gradients were sent to replicas, which repeat it without that code.

    Args:
        found: result of `foreign_code`.

    Raises:
        UnsupportedState: code was found; the message names it and says what to do instead.
    """
    if found is not None:
        states = ", ".join(name for name, preset in PRESETS.items() if "replayed" not in preset.kinds)
        raise UnsupportedState(
            f"{found} runs in optimizer.step(), but replicas repeat each step from the gradients that they got before, "
            "without it: after a loss they would hold weights that nobody has trained. Change gradients in "
            "Session(on_gradients=...), clip with max_grad_norm, or choose a preset that sends the state after each "
            f"step: one of {states}"
        )


def _foreign(optimizer: torch.optim.Optimizer) -> Iterator[str]:
    kinds: list[tuple[str, dict[int, Callable[..., Any]]]] = [
        ("register_optimizer_step_pre_hook", torch_optimizer._global_optimizer_pre_hooks),
        ("optimizer.register_step_pre_hook", optimizer._optimizer_step_pre_hooks),
        ("optimizer.register_step_post_hook", optimizer._optimizer_step_post_hooks),
        ("register_optimizer_step_post_hook", torch_optimizer._global_optimizer_post_hooks),
    ]
    for kind, hooks in kinds:
        yield from (f"the hook {kind}({_described(hook)})" for hook in hooks.values() if not _is_known(hook))
    own = vars(optimizer).get("step")
    if own is not None and not _is_of_scheduler(own, type(optimizer).step):
        yield f"optimizer.step = {_described(own)}"
    of_class = foreign_step(optimizer)
    if of_class is not None:
        yield of_class


def _is_of_scheduler(own: Any, of_class: Callable[..., Any]) -> bool:
    """Whether a scheduler of torch has wrapped the class's step on the instance."""
    code = getattr(own, "__code__", None)
    return (
        code is not None
        and code.co_filename == lr_scheduler.LRScheduler.__init__.__code__.co_filename
        and own.__wrapped__ is of_class
    )


def _is_known(code: Any) -> bool:
    module = _module(code)
    return (
        module.partition(".")[0] in ("torch", "evermoe") and module != "evermoe.optim.ema"
    )  # an average has its own states


def _module(code: Any) -> str:
    while isinstance(code, functools.partial):
        code = code.func
    return getattr(code, "__module__", None) or type(code).__module__


def _described(code: Any) -> str:
    while isinstance(code, functools.partial):
        code = code.func
    return f"{getattr(code, '__qualname__', type(code).__qualname__)} of {_module(code)}"
