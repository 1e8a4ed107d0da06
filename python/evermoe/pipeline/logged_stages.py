"""Logs what the stages of a schedule of `torch.distributed.pipelining` compute, so that nothing is computed twice.

A schedule calls its stages' `forward_one_chunk`, `backward_one_chunk` and `backward_weight_one_chunk`. During a run of
a step each of them first looks in the log: a recorded microbatch was computed before a failure, and is sent again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from evermoe.errors import PeerLost
from evermoe.pipeline.border_log import Backward, Forward, LoggedChunk, LoggedStep, WeightsLeft
from evermoe.pipeline.host_copy import BorderDigest, on_device


class OtherData(PeerLost):
    """A repeated microbatch has other bits than the one that was logged."""


def stages_of(schedule: Any) -> list[Any]:
    """The stages of this rank in a schedule; none if it does not keep them as torch's own schedules do."""
    found = getattr(schedule, "_stages", None) or [getattr(schedule, "_stage", None)]
    return [stage for stage in found if stage is not None]


def digest_of(values: Any) -> BorderDigest:
    """The digest of all tensors in nested tuples, lists and dicts."""
    return BorderDigest([each.detach().contiguous() for each in tree_leaves(values) if isinstance(each, Tensor)])


def compare(found: BorderDigest, logged: BorderDigest, what: str) -> None:
    """Compare digests.

    Raises:
        OtherData: they differ.
    """
    if found != logged:
        raise OtherData(
            f"{what} has other bits than before the failure. Batches, targets and all that a stage computes must "
            "depend on the step alone; all ranks compute the step again"
        )


def forwards_of(stage: Any) -> dict[int, Any]:
    """Values that a stage keeps of forwards until their backward, by microbatch."""
    return stage.fwd_cache if hasattr(stage, "fwd_cache") else stage._forward_chunk_states  # the latter: torch 2.15


def cached_forward(stage: Any, number: int) -> tuple[tuple[Any, ...], list[Any]]:
    """Outputs and inputs of a forward that has just been computed."""
    kept = forwards_of(stage)[number]
    return kept if isinstance(kept, tuple) else (tuple(kept.live_outputs), kept.input_values)


def cache_forward(stage: Any, number: int, forward: Forward) -> None:
    """Put a stage into the state in which it is after a forward."""
    make = getattr(stage, "_make_forward_chunk_state", lambda *parts: parts)
    forwards_of(stage)[number] = make(forward.outputs, forward.inputs)


def drain(received: Sequence[Any]) -> None:
    """Empty the buffers in which a stage has received: torch 2.15 requires this before it receives again."""
    for info in received:
        if hasattr(info, "take_buffer"):
            info.buffer = None


@contextmanager
def logged(stages: Sequence[Any], step: LoggedStep | None, run: int, seed: Callable[..., None]) -> Iterator[None]:
    """Log what stages compute during the block, and answer from the log if it has a record.

    Args:
        stages: of `torch.distributed.pipelining`.
        step: record of the step; None to log nothing.
        run: number of the schedule's run in the step.
        seed: called before each computed forward with the numbers of the run, the stage and the microbatch.
    """
    with ExitStack() as stack:
        for stage in stages:
            own = _LoggedStage(stage, step, run, seed) if step is not None else _SeededStage(stage, run, seed)
            for name in own.names:
                setattr(stage, name, getattr(own, name))
                stack.callback(delattr, stage, name)
        yield


class _SeededStage:
    """A stage that draws the same random numbers each time a microbatch is computed."""

    names: Iterable[str] = ("forward_one_chunk", "_get_init_p2p_neighbors_ops")

    def __init__(self, stage: Any, run: int, seed: Callable[..., None]) -> None:
        self._stage, self._run, self._seed = stage, run, seed
        self._forward = stage.forward_one_chunk
        self._greetings = getattr(stage, "_get_init_p2p_neighbors_ops", None)

    def forward_one_chunk(self, number: int, *args: Any, **options: Any) -> Any:
        self._seed(self._run, self._stage.stage_index, number)
        return self._forward(number, *args, **options)

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        """First messages between neighbours, without those of a rank to itself, which gloo refuses.

        In a V torch 2.11 sends such messages.
        """
        found = self._greetings() if self._greetings is not None else []
        return [each for each in found if each.peer != dist.get_rank()]


class _LoggedStage(_SeededStage):
    """Replace three methods of a stage."""

    names = (*_SeededStage.names, "backward_one_chunk", "backward_weight_one_chunk")

    def __init__(self, stage: Any, step: LoggedStep, run: int, seed: Callable[..., None]) -> None:
        super().__init__(stage, run, seed)
        self._step = step
        self._backward, self._weights = stage.backward_one_chunk, stage.backward_weight_one_chunk

    def _chunk(self, number: int) -> LoggedChunk:
        return self._step.chunk(self._run, self._stage.stage_index, number)

    def _name(self, what: str, number: int) -> str:
        return f"step {self._step.number}: {what} of microbatch {number} at stage {self._stage.stage_index}"

    def forward_one_chunk(self, number: int, *args: Any, save_forward_output: bool = True, **options: Any) -> Any:
        stage, chunk = self._stage, self._chunk(number)
        received = [] if stage.is_first else stage.args_recv_info[number]
        digest = digest_of(([info.buffer for info in received], args, options))
        if chunk.forward is None:
            options["save_forward_output"] = save_forward_output
            self._step.count_on()
            output = super().forward_one_chunk(number, *args, **options)
            self._step.note_forward()
            outputs, inputs = cached_forward(stage, number)
            chunk.forward = Forward(output if self._is_returned(save_forward_output) else None, outputs, inputs, digest)
            return output
        compare(digest, chunk.forward.digest, self._name("the input", number))
        drain(received)
        returned, outputs = on_device((chunk.forward.returned, chunk.forward.outputs))
        cache_forward(stage, number, chunk.forward._replace(outputs=outputs))
        self._step.forwards.resent += 1
        if self._is_returned(save_forward_output):
            stage.output_chunks.append(returned)
            return returned
        return outputs if len(outputs) != 1 else outputs[0]

    def _is_returned(self, is_saved: bool) -> bool:
        return bool(self._stage.is_last and is_saved)

    def backward_one_chunk(self, number: int, *args: Any, full_backward: bool = True, **options: Any) -> None:
        stage, chunk = self._stage, self._chunk(number)
        options["full_backward"] = full_backward
        if not stage.has_backward:
            self._backward(number, *args, **options)
            return
        received = [] if stage.is_last else stage.grad_recv_info[number]
        digest = digest_of([info.buffer for info in received])
        if chunk.backward is None:
            with self._tearing():
                self._backward(number, *args, **options)
            chunk.backward = Backward(stage.bwd_cache[number], digest)
            self._after_backward(chunk, number, is_full=full_backward)
            return
        compare(digest, chunk.backward.digest, self._name("the output's gradient", number))
        drain(received)
        forwards_of(stage).pop(number)
        stage.bwd_cache[number] = on_device(chunk.backward.gradients)
        if chunk.weights_left is not None:
            stage.backward_state[number] = chunk.weights_left.state
            stage.dw_runner[number] = chunk.weights_left.runner

    def _after_backward(self, chunk: LoggedChunk, number: int, *, is_full: bool) -> None:
        if is_full:
            chunk.has_weights = True
            self._strip(chunk)
        else:
            left = self._stage.backward_state.get(number), self._stage.dw_runner.get(number)
            chunk.weights_left = WeightsLeft(*left)

    def backward_weight_one_chunk(self, number: int, *args: Any, **options: Any) -> None:
        stage, chunk = self._stage, self._chunk(number)
        if chunk.has_weights:
            stage.backward_state.pop(number, None)
            stage.dw_runner.pop(number, None)
            return
        with self._tearing():
            self._weights(number, *args, **options)
        if stage.has_backward:
            chunk.has_weights = True
            self._strip(chunk)

    def _strip(self, chunk: LoggedChunk) -> None:
        chunk.strip()
        if self._stage.is_last and chunk.forward is not None:  # nobody gets it
            chunk.forward = chunk.forward._replace(outputs=())

    @contextmanager
    def _tearing(self) -> Iterator[None]:
        self._step.is_torn = True
        yield
        self._step.is_torn = False
