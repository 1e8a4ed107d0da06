"""Recording of forward, backward and optimizer, of a complete model or of a pipeline's microbatches."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from evermoe.planning.windows import Kind
from evermoe.profile.patches import Patches
from evermoe.profile.recorder import OpenSpan, Recorder

PIPELINING = "torch.distributed.pipelining.stage"
"""Module whose stages are recorded once other code has imported it: its import takes seconds."""


def attach_model(recorder: Recorder, patches: Patches, model: nn.Module) -> None:
    """Attach forward hooks to the model, and to its parts for a model that is not called itself."""
    for name, module in _parts(model, ""):
        _attach_forward(recorder, patches, module, f"forward {name}".rstrip())


def _parts(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the module and its children; containers, which are never called, are replaced by their contents."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        yield name, module
    is_called = name or hasattr(module, "_orig_mod")  # the result of torch.compile is called as one module
    if not is_called or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        for child_name, child in module.named_children():
            yield from _parts(child, f"{name}.{child_name}".lstrip("."))


def _attach_forward(recorder: Recorder, patches: Patches, module: nn.Module, name: str) -> None:
    open_spans: list[OpenSpan | None] = []  # a module may call itself

    def before(*_: Any) -> None:
        if not torch.compiler.is_compiling():  # keep hooks out of the graph that torch.compile traces
            open_spans.append(recorder.begin(name, "forward", "compute"))

    def after(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            span = open_spans.pop() if open_spans else None
            if span is not None:
                recorder.close(span)

    patches.add(module.register_forward_pre_hook(before, prepend=True).remove)
    patches.add(module.register_forward_hook(after, always_call=True).remove)


def attach_backward(recorder: Recorder, patches: Patches) -> None:
    """Wrap `torch.autograd.backward`, which `Tensor.backward` calls, and `torch.autograd.grad`."""
    wrap = functools.partial(_timed, recorder, "backward", lambda *_, **__: "backward")
    patches.replace(torch.autograd, "backward", wrap)
    patches.replace(torch.autograd, "grad", wrap)


def attach_optimizers(recorder: Recorder, patches: Patches) -> None:
    """Wrap the `step` of all optimizers."""
    open_spans: list[OpenSpan | None] = []

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not recorder.on:
            open_spans.clear()
        open_spans.append(recorder.begin(f"optimizer {type(optimizer).__name__}", "optimizer", "compute"))

    def after(*_: Any) -> None:
        span = open_spans.pop() if open_spans else None
        if span is not None:
            recorder.close(span)

    patches.add(register_optimizer_step_pre_hook(before).remove)
    patches.add(register_optimizer_step_post_hook(after).remove)


def attach_pipelines(recorder: Recorder, patches: Patches) -> None:
    """Wrap the microbatches of all stages of `torch.distributed.pipelining`; spans name stage and number."""
    module = sys.modules.get(PIPELINING)
    stage = getattr(module, "_PipelineStageBase", None)
    if stage is None:
        return

    wrap = functools.partial(_timed, recorder)
    patches.replace(stage, "forward_one_chunk", functools.partial(wrap, "forward", _forward_name))
    patches.replace(stage, "backward_one_chunk", functools.partial(wrap, "backward", _backward_name))
    patches.replace(stage, "backward_weight_one_chunk", functools.partial(wrap, "backward", _weight_name))


# These functions have the parameters of the methods whose spans they name.


def _forward_name(stage: Any, fwd_chunk_id: int, *_: Any, **__: Any) -> str:
    return f"forward stage {stage.stage_index} microbatch {fwd_chunk_id}"


def _backward_name(
    stage: Any, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, *_: Any, **__: Any
) -> str:
    what = "backward" if full_backward else "backward input"
    return f"{what} stage {stage.stage_index} microbatch {bwd_chunk_id}"


def _weight_name(stage: Any, bwd_chunk_id: int, *_: Any, **__: Any) -> str:
    return f"backward weight stage {stage.stage_index} microbatch {bwd_chunk_id}"


def _timed(
    recorder: Recorder, kind: Kind, name: Callable[..., str], original: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*arguments: Any, **keywords: Any) -> Any:
        span = recorder.begin(name(*arguments, **keywords), kind, "compute") if recorder.on else None
        if span is None:
            return original(*arguments, **keywords)
        try:
            return original(*arguments, **keywords)
        finally:
            recorder.close(span)

    return call
