"""Ops of `evermoe.MoE` inside `torch.compile`: host planning, exchanges and the experts' products, each opaque.

A graph refers to its layer by a tensor whose value is read when the op runs, so that equal layers share one graph.
Without `torch.compile` the layer does the same without these ops.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from evermoe.comm import step_exchanges
from evermoe.comm.group import Group
from evermoe.errors import UnsupportedState
from evermoe.moe import checkpointing
from evermoe.moe.expert import Product
from evermoe.moe.forward_turns import Manner, Served
from evermoe.moe.lost_exchange import keep_for_backward
from evermoe.moe.token_counts import TokenCount
from evermoe.moe.token_exchange import Exchange


class Layer(Served, Protocol):
    """Attributes of a layer that the ops use when they run."""

    group: Group
    ids: list[int]
    count: TokenCount

    def plan_exchange(self, counts_E: Tensor) -> Exchange:
        """Plan the exchange of this rank's tokens for each expert; collective."""
        ...


_layers: WeakValueDictionary[int, Layer] = WeakValueDictionary()
_numbers = itertools.count()


def register(layer: Layer) -> Tensor:
    """Return a CPU tensor that refers to the layer in compiled graphs, for as long as the layer lives."""
    number = next(_numbers)
    _layers[number] = layer
    return torch.tensor(number, device="cpu")


def live_layers() -> list[Layer]:
    """Return all registered layers that still exist."""
    return list(_layers.values())


def takes_groups(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> bool:
    """Return whether `grouped_mm` is fast for matrices of this dtype with rows of these lengths.

    Rows must be a multiple of 16 bytes. On a GPU only bfloat16 has a grouped kernel: for other dtypes torch copies the
    rows' ends to the host and runs one product per expert.
    """
    quick = (torch.bfloat16,) if device.type == "cuda" else (torch.float32, torch.bfloat16, torch.float16)
    return dtype in quick and all(width * dtype.itemsize % 16 == 0 for width in widths)


# ---- sizes that are known when an op runs


def _dynamic_size(least: int) -> torch.SymInt:
    """Return a size that depends on data, for the fake result of an op.

    torch's own `new_dynamic_size` breaks the graph at the op, unless `fullgraph=True` or
    `torch._dynamo.config.capture_dynamic_output_shape_ops` is set. No op after these depends on the value of a size, so
    the rest of a graph is traced in any case.
    """
    context = torch.library.get_ctx()
    if context._shape_env is None:
        return context.new_dynamic_size(min=least)
    from torch._library.fake_impl import allocate_size  # not part of torch's API, so only graphs depend on it

    return allocate_size(context._shape_env, least)


# ---- planning


@torch.library.custom_op("evermoe::plan_exchange", mutates_args=())
def plan_exchange(
    layer: Tensor, counts_E: Tensor, num_local: int, manner: list[int], is_recorded: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gather the load, count it in the layer, and plan the exchange of tokens; collective.

    Args:
        layer: from `register`.
        counts_E: int64, this rank's tokens of each expert.
        num_local: e, experts of this rank.
        manner: the fields of a `Manner`, with which other members serve this forward in an evaluation.
        is_recorded: whether gradients are recorded.

    Returns:
        `share_E`, float32; `send_ER` and `receive_Re`, int64, on the device of the counts; `splits_2R`, int64 on the
        CPU: rows to each rank, and from each rank. R is 1 if all ranks keep their tokens.

    Raises:
        UnsupportedState: reentrant checkpointing repeats the graph, which cannot carry the gradient of a loss; or the
            repeated graph has chosen other experts.
    """
    if checkpointing.is_recomputing_reentrant():
        raise UnsupportedState(
            "Experts: reentrant activation checkpointing around a compiled layer leaves the router's balance_loss "
            "without a gradient; call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
        )
    found = _layers[int(layer)]
    # A compiler writes other values to the buffer of the counts later, so that a copy is kept. Only a repeat compares.
    kept_E = checkpointing.once(found, "counts", counts_E.clone) if checkpointing.is_enclosed() else counts_E
    is_repeat = checkpointing.is_recomputing() and not found.group.gives_zeros  # zeros change the scores
    if is_repeat and not torch.equal(kept_E, counts_E):
        raise UnsupportedState(
            "Experts: activation checkpointing ran a compiled forward again, and the router has chosen other experts "
            "than before: call torch.utils.checkpoint.checkpoint with preserve_rng_state=True, or inside the compiled "
            "function"
        )
    if found.turns is not None:
        found.turns.take(found, Manner(*manner))
    exchange = found.plan_exchange(counts_E)
    if is_recorded and found.group.finishes_steps:
        keep_for_backward(found.count, exchange)
    splits_2R = torch.tensor([exchange.sizes.sent_R, exchange.sizes.received_R], device="cpu")
    return exchange.share_E.float(), exchange.send_ER, exchange.receive_Re, splits_2R


@plan_exchange.register_fake
def _(
    layer: Tensor, counts_E: Tensor, num_local: int, manner: list[int], is_recorded: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ranks, experts = _dynamic_size(1), counts_E.shape[0]
    share_E = counts_E.new_empty((experts,), dtype=torch.float32)
    send_ER, receive_Re = counts_E.new_empty((experts, ranks)), counts_E.new_empty((ranks, num_local))
    return share_E, send_ER, receive_Re, layer.new_empty((2, ranks))


# ---- exchanges


def _exchange(layer: Tensor, rows: Tensor, splits_2R: Tensor, is_return: bool) -> Tensor:
    """Exchange rows. Those after the sent ones are choices of no expert, which stay on this rank."""
    send, receive = splits_2R.flip(0).tolist() if is_return else splits_2R.tolist()
    rows = rows.narrow(0, 0, sum(send))
    return rows.clone() if len(send) == 1 else step_exchanges.all_to_all(rows, send, receive, _layers[int(layer)].group)


@torch.library.custom_op("evermoe::send_rows", mutates_args=())
def send_rows(layer: Tensor, rows: Tensor, splits_2R: Tensor) -> Tensor:
    """Send rows to the experts' ranks; return the received ones, `[N, H]`. Collective and differentiable."""
    return _exchange(layer, rows, splits_2R, is_return=False)


@send_rows.register_fake
def _(layer: Tensor, rows: Tensor, splits_2R: Tensor) -> Tensor:
    return rows.new_empty((_dynamic_size(0), rows.shape[1]))


@torch.library.custom_op("evermoe::exchange_rows", mutates_args=())
def exchange_rows(layer: Tensor, rows: Tensor, splits_2R: Tensor, num_rows: int, is_return: bool) -> Tensor:
    """Send rows to the experts' ranks or back; return the received ones, padded with zeros to `[num_rows, H]`.

    Collective and differentiable.
    """
    arrived = _exchange(layer, rows, splits_2R, is_return)
    return F.pad(arrived, (0, 0, 0, num_rows - len(arrived))) if len(arrived) < num_rows else arrived


@exchange_rows.register_fake
def _(layer: Tensor, rows: Tensor, splits_2R: Tensor, num_rows: int, is_return: bool) -> Tensor:
    return rows.new_empty((num_rows, rows.shape[1]))


def _keep_route(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    layer, rows, splits_2R = inputs[:3]
    ctx.save_for_backward(layer, splits_2R)
    ctx.num_rows, ctx.is_return = rows.shape[0], inputs[4] if len(inputs) > 3 else False


def _send_back(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
    layer, splits_2R = ctx.saved_tensors
    return None, exchange_rows(layer, gradient, splits_2R, ctx.num_rows, not ctx.is_return), None


send_rows.register_autograd(_send_back, setup_context=_keep_route)
exchange_rows.register_autograd(
    lambda ctx, gradient: (*_send_back(ctx, gradient), None, None), setup_context=_keep_route
)


@torch.library.custom_op("evermoe::sum_over_members", mutates_args=())
def sum_over_members(layer: Tensor, values: Tensor) -> Tensor:
    """Sum values over the members of the layer's group; the backward sums the gradient over them. Collective.

    Args:
        layer: from `register`.
        values: any shape.
    """
    return step_exchanges.all_reduce(values, _layers[int(layer)].group)


@sum_over_members.register_fake
def _(layer: Tensor, values: Tensor) -> Tensor:
    return values.new_empty(values.shape)


sum_over_members.register_autograd(
    lambda ctx, gradient: (None, sum_over_members(ctx.saved_tensors[0], gradient)),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


# ---- the experts' products


def multiply_at_once(rows_NC: Tensor, matrices_eDC: Tensor, ends_e: Tensor) -> Tensor:
    """Compute `multiply` with one grouped kernel, for matrices that `takes_groups` allows."""
    return F.grouped_mm(rows_NC, matrices_eDC.transpose(1, 2), offs=ends_e)


def multiply_one_by_one(rows_NC: Tensor, matrices_eDC: Tensor, lengths_e: Sequence[int]) -> Tensor:
    """Compute `multiply` expert by expert, for any dtype and size; zeros for rows after the last expert's."""
    *blocks, rest = rows_NC.split([*lengths_e, len(rows_NC) - sum(lengths_e)])
    outputs = [F.linear(block, matrix) for block, matrix in zip(blocks, matrices_eDC, strict=True)]
    return torch.cat([*outputs, rest.new_zeros(len(rest), matrices_eDC.shape[1])])


def exchange_product(exchange: Exchange, dtype: torch.dtype, widths: Sequence[int]) -> Product:
    """Return the product for the exchange's rows of each local expert."""
    ends_e, lengths_e = exchange.ends_e, exchange.sizes.lengths_e
    if lengths_e is None or takes_groups(ends_e.device, dtype, widths):
        return lambda rows_NC, matrices_eDC: multiply_at_once(rows_NC, matrices_eDC, ends_e)
    return lambda rows_NC, matrices_eDC: multiply_one_by_one(rows_NC, matrices_eDC, lengths_e)


def product_of(ends_e: Tensor) -> Product:
    """Return the fastest product of rows with their experts' matrices, inside or outside graphs.

    Args:
        ends_e: int32, the end of each expert's rows; on a GPU the host reads them if `takes_groups` returns False.
    """

    def product(rows_NC: Tensor, matrices_eDC: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return multiply(rows_NC, matrices_eDC, ends_e)
        if takes_groups(rows_NC.device, rows_NC.dtype, matrices_eDC.shape[1:]):
            return multiply_at_once(rows_NC, matrices_eDC, ends_e)
        return multiply_one_by_one(rows_NC, matrices_eDC, _lengths(ends_e))

    return product


@torch.library.custom_op("evermoe::multiply", mutates_args=())
def multiply(rows_NC: Tensor, matrices_eDC: Tensor, ends_e: Tensor) -> Tensor:
    """Multiply each expert's rows with its matrix, transposed: `[N, D]`. Differentiable.

    torch's own `grouped_mm` cannot be traced with float32 or float16 before 2.12.

    Args:
        rows_NC: rows ordered by expert.
        matrices_eDC: of the same dtype.
        ends_e: int32, the end of each expert's rows.
    """
    if takes_groups(rows_NC.device, rows_NC.dtype, matrices_eDC.shape[1:]):
        return multiply_at_once(rows_NC, matrices_eDC, ends_e)
    return multiply_one_by_one(rows_NC, matrices_eDC, _lengths(ends_e))


@multiply.register_fake
def _(rows_NC: Tensor, matrices_eDC: Tensor, ends_e: Tensor) -> Tensor:
    return rows_NC.new_empty((rows_NC.shape[0], matrices_eDC.shape[1]))


@torch.library.custom_op("evermoe::multiply_backward", mutates_args=())
def multiply_backward(
    gradient_ND: Tensor, rows_NC: Tensor, matrices_eDC: Tensor, ends_e: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `multiply` for the rows and for the matrices."""
    gradient_ND = gradient_ND.contiguous()
    if takes_groups(rows_NC.device, rows_NC.dtype, matrices_eDC.shape[1:]):
        rows = F.grouped_mm(gradient_ND, matrices_eDC, offs=ends_e)
        return rows, F.grouped_mm(gradient_ND.t(), rows_NC, offs=ends_e)
    lengths = _lengths(ends_e)
    lengths.append(len(rows_NC) - sum(lengths))
    *gradients, _ = gradient_ND.split(lengths)
    *blocks, rest = rows_NC.split(lengths)
    parts = list(zip(gradients, blocks, matrices_eDC, strict=True))
    rows = torch.cat([*(gradient @ matrix for gradient, _, matrix in parts), torch.zeros_like(rest)])
    return rows, torch.stack([gradient.t() @ block for gradient, block, _ in parts])


@multiply_backward.register_fake
def _(gradient_ND: Tensor, rows_NC: Tensor, matrices_eDC: Tensor, ends_e: Tensor) -> tuple[Tensor, Tensor]:
    return rows_NC.new_empty(rows_NC.shape), matrices_eDC.new_empty(matrices_eDC.shape)


def _lengths(ends_e: Tensor) -> list[int]:
    return ends_e.diff(prepend=ends_e.new_zeros(1)).tolist()


def _keep_factors(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _multiply_gradients(ctx: Any, gradient_ND: Tensor) -> tuple[Tensor, Tensor, None]:
    return *multiply_backward(gradient_ND, *ctx.saved_tensors), None


multiply.register_autograd(_multiply_gradients, setup_context=_keep_factors)
