"""Paths and kinds of a model's modules, without the wrappers around them."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module", "module")
"""Names that wrappers give to the module inside: `torch.compile`, torch's `checkpoint_wrapper`, and most others."""


def named_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what `model.named_modules()` yields, with the paths of the model without wrappers, and without these.

        >>> import torch
        >>> [path for path, _ in named_parts(torch.compile(nn.Sequential(nn.Linear(1, 1))))]
        ['', '0']

    So units and checkpoints of a compiled or checkpointed model have the names of the plain one, and each loads the
    other's.
    """
    yield from _named_parts(model, "", set())


def _named_parts(module: nn.Module, path: str, seen: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    inner = wrapped_by(module)
    if inner is not None:
        yield from _named_parts(inner, path, seen)
        return
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _named_parts(child, f"{path}.{name}" if path else name, seen)


def wrapped_by(module: nn.Module) -> nn.Module | None:
    """Return the module inside a wrapper; None if this is no wrapper, or has tensors or children of its own."""
    if len(module._modules) != 1 or module._parameters or module._buffers:
        return None
    ((name, inner),) = module._modules.items()
    return inner if name in WRAPPED else None


def norm_over_rows(module: nn.Module | None) -> str | None:
    """Return the class of a torch norm over several rows that the module is or contains; None without one."""
    parts = [] if module is None else module.modules()
    return next((type(part).__name__ for part in parts if isinstance(part, _NormBase)), None)
