"""Record which experts a forward uses, and use them in another forward.

In reinforcement learning the engine that generates and the engine that trains compute router scores that differ in
their last bits, and so they choose other experts for some tokens. Rollout routing replay (R3) trains with the experts
of the rollout (Ma et al. 2025, arXiv:2510.11370). Ids are plain tensors, of the shape in which vLLM and SGLang return
them (`routed_experts`).

Shape suffixes: T tokens of this rank, L layers with experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from evermoe.moe.choice import Recorder, Replaced, Replay, prepare_compiled, watch
from evermoe.moe.experts import Experts, expert_layers
from evermoe.moe.layer import MoE, moe_layers
from evermoe.moe.module_paths import wrapped_by


class Routing:
    """The routing of forwards: `ids` and `weights` of all their tokens.

    Args:
        recorders: of each layer by path, in the order of the model's modules.
    """

    def __init__(self, recorders: Mapping[str, Recorder]) -> None:
        self._recorders = dict(recorders)

    @property
    def ids(self) -> Tensor:
        """int64 `[T, L, K]` on the layers' device: experts of each token, the best one first.

        T is the number of tokens of all forwards, one forward after the other; L follows the order of the model's
        modules. -1: the token is padding (`mask` of `MoE`), or the layer had no forward. Numbers of E and more are
        the `identity_experts` of a `Router`.

        Raises:
            RuntimeError: the layers had forwards of different numbers of tokens, or choose different numbers of
                experts: such routing has no common shape.
        """
        return self._stack({name: recorder.ids for name, recorder in self._recorders.items()})

    @property
    def weights(self) -> Tensor:
        """`[T, L, K]`, dtype of the router's weights: weights of the experts' outputs, without a graph.

        Those of padding are 0.

        Raises:
            RuntimeError: as of `ids`.
        """
        return self._stack({name: recorder.weights for name, recorder in self._recorders.items()})

    def of_sequences(self, batch: int) -> Routing:
        """Return the routing of the sequences of a generation, token by token of each sequence.

        A generation runs a forward on the prompts, and one on each new token of all sequences. In `ids` the tokens are
        in the order of these forwards. Here `ids` are those of the first sequence, then those of the second one, and
        so on, as a forward on the complete sequences has them: `ids.view(batch, -1, L, K)`.

        Args:
            batch: number of sequences, the same in all forwards. The tokens of a forward are `[batch, n]`.

        Raises:
            ValueError: a forward's number of tokens is no multiple of `batch`.
        """
        found = {}
        for name, recorder in self._recorders.items():
            found[name] = Recorder()
            if any(len(ids_TK) % batch for ids_TK in recorder.ids):
                lengths = [len(ids_TK) for ids_TK in recorder.ids]
                raise ValueError(
                    f"of_sequences: expected forwards of a multiple of batch={batch} tokens, got {lengths} at layer "
                    f"{name}"
                )
            if recorder.ids:
                found[name].ids = [_by_sequence(recorder.ids, batch)]
                found[name].weights = [_by_sequence(recorder.weights, batch)]
        return Routing(found)

    def _stack(self, rows: dict[str, list[Tensor]]) -> Tensor:
        layers = {name: torch.cat(parts) for name, parts in rows.items() if parts}
        shapes = {name: tuple(layer_TK.shape) for name, layer_TK in layers.items()}
        if len(set(shapes.values())) != 1:
            raise RuntimeError(
                "record_routing: expected forwards in the block, with the same tokens and the same number of experts "
                f"per token in each layer, got [tokens, k] of {shapes or 'no layer'}"
            )
        like = next(iter(layers.values()))
        missing = torch.full_like(like, 0 if like.is_floating_point() else -1)
        return torch.stack([layers.get(name, missing).to(like.device) for name in rows], 1)


def _by_sequence(parts: list[Tensor], batch: int) -> Tensor:
    return torch.cat([part.unflatten(0, (batch, -1)) for part in parts], 1).flatten(0, 1)


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routing]:
    """Record the experts of all tokens in the forwards of a `with` block.

        with evermoe.record_routing(model) as routing:
            model(tokens)
        routing.ids  # [tokens, layers, k]

    Each member of a session records the tokens of its own forwards. Recomputations by activation checkpointing are no
    forwards. In a compiled model the choice of experts runs outside the graph while the block runs.

    Args:
        model: with `MoE` or `Experts`, or a model of transformers made elastic.

    Yields:
        The `Routing`, which the forwards extend; it remains valid after the block.

    Raises:
        ValueError: the model has no layer of experts.
    """
    layers = _layers(model, "record_routing")
    recorders = {name: Recorder() for name in layers}
    with _replaced(model, layers, recorders=recorders):
        yield Routing(recorders)


@contextmanager
def replay_routing(model: nn.Module, ids: Tensor | NDArray, weights: Tensor | NDArray | None = None) -> Iterator[None]:
    """Use the given experts in the forwards of a `with` block, in place of the routers' choices.

        with evermoe.replay_routing(model, routing.ids):
            loss = model(tokens).loss
        loss.backward()

    The routers compute the weights of the given experts from their current scores, as they do for their own choice. So
    routers are trained (R3). With `weights`, those are used, and routers get gradients from balancing losses alone.

    Only the choice is replaced. Loads, `load_E` and the balance of a `Router` count the given experts, which compute;
    so does f_e of `balance_loss`. P_e is of the router's current scores. The loss that transformers' models add with
    `output_router_logits` counts the experts that the router would choose itself. A backward may follow the block: a
    recomputation by activation checkpointing uses the experts of its forward. Each member of a session gives the
    routing of its own tokens, and a step that is repeated runs the block again. In a compiled model the choice of
    experts runs outside the graph while the block runs.

    Args:
        model: as of `record_routing`.
        ids: integers `[..., L, K]`, as `Routing.ids` or as vLLM and SGLang return them; the dimensions before L are
            those of the tokens, for example `[batch, sequence, L, K]`. L counts the layers with experts, in the order
            of the model's modules. Several forwards in the block take their tokens one after the other. -1 for all K
            of a token and layer: the router chooses itself, for padding or for tokens whose routing is unknown.
        weights: `[..., L, K]`, floating-point; None: of the routers.

    Raises:
        ValueError: a shape does not fit the model, an id is out of range, a token has an expert twice or -1 next to
            experts, or the forwards of the block have more or fewer tokens than `ids`; the message names the layer.
        UnsupportedState: in a forward without `weights`: a router of another kind does not choose by `torch.topk`.
    """
    layers = _layers(model, "replay_routing")
    ids_TLK = _integers(_rows(torch.as_tensor(ids), "ids", len(layers)))
    weights_TLK = None if weights is None else _rows(torch.as_tensor(weights), "weights", len(layers))
    _check(ids_TLK, weights_TLK)
    routers = {id(layer.experts): layer.router.out_features for layer in moe_layers(model).values()}
    replays = {}
    for number, (name, experts) in enumerate(layers.items()):
        ids_TK = ids_TLK[:, number]
        most = routers.get(id(experts), experts.num_experts)
        if len(ids_TK) and not -1 <= int(ids_TK.min()) <= int(ids_TK.max()) < most:
            raise ValueError(
                f"replay_routing: expected ids of 0 to {most - 1} for layer {name}, or -1, got {int(ids_TK.min())} to "
                f"{int(ids_TK.max())}"
            )
        weights_TK = None if weights_TLK is None else weights_TLK[:, number].to(experts.weights.device)
        replays[name] = Replay(name, ids_TK.to(experts.weights.device), weights_TK)
    with _replaced(model, layers, replays=replays):
        yield
    left = {name: len(replay) - replay.place for name, replay in replays.items() if replay.is_used}
    if any(left.values()):
        name, tokens = max(left.items(), key=lambda item: item[1])
        raise ValueError(
            f"replay_routing: expected forwards with the {len(ids_TLK)} tokens of ids in the block, but layer {name} "
            f"had {len(ids_TLK) - tokens}"
        )


def watch_routers(model: nn.Module) -> None:
    """Let choices be replaced and repeated in all modules with a router of another kind than `Router`.

    Args:
        model: with `Experts`.
    """
    for parent in model.modules():
        found = [child for child in map(_inside, parent.children()) if isinstance(child, Experts)]
        if not isinstance(parent, MoE) and len(found) == 1 and _inside(parent) is parent:
            watch(parent, found[0])


def _inside(module: nn.Module) -> nn.Module:
    """Return the module inside wrappers, also those of peft."""
    inner = wrapped_by(module) or module._modules.get("base_layer")
    return module if inner is None else _inside(inner)


def _layers(model: nn.Module, name: str) -> dict[str, Experts]:
    layers = expert_layers(model)
    if not layers:
        raise ValueError(f"{name}: expected a model with evermoe.MoE or evermoe.Experts, got one without any")
    return layers


@contextmanager
def _replaced(
    model: nn.Module,
    layers: Mapping[str, Experts],
    *,
    replays: Mapping[str, Replay] | None = None,
    recorders: Mapping[str, Recorder] | None = None,
) -> Iterator[None]:
    watch_routers(model)
    prepare_compiled()
    previous = {name: layer.replaced for name, layer in layers.items()}
    for name, layer in layers.items():
        before = previous[name] or Replaced(None, ())
        layer.replaced = Replaced(
            before.replay if replays is None else replays[name],
            before.recorders if recorders is None else (*before.recorders, recorders[name]),
        )
    try:
        yield
    finally:
        for name, layer in layers.items():
            layer.replaced, layer.choice = previous[name], None


def _rows(numbers: Tensor, name: str, layers: int) -> Tensor:
    """Return `[T, L, K]`."""
    if numbers.dim() < 3 or numbers.shape[-2] != layers:
        raise ValueError(
            f"replay_routing: expected {name} [tokens, {layers}, k], as the model has {layers} layers with experts, "
            f"got {list(numbers.shape)}. If an engine returns a row for each decoder layer, select those with experts"
        )
    return numbers.reshape(-1, *numbers.shape[-2:])


def _integers(ids_TLK: Tensor) -> Tensor:
    if ids_TLK.is_floating_point() or ids_TLK.is_complex() or ids_TLK.dtype == torch.bool:
        raise ValueError(f"replay_routing: expected ids of an integer type, got {ids_TLK.dtype}")
    return ids_TLK.long()


def _check(ids_TLK: Tensor, weights_TLK: Tensor | None) -> None:
    if weights_TLK is not None and (weights_TLK.shape != ids_TLK.shape or not weights_TLK.is_floating_point()):
        raise ValueError(
            f"replay_routing: expected floating-point weights of the ids' shape {list(ids_TLK.shape)}, got "
            f"{weights_TLK.dtype} {list(weights_TLK.shape)}"
        )
    is_none_TLK = ids_TLK < 0
    if bool((is_none_TLK.any(-1) & ~is_none_TLK.all(-1)).any()):
        raise ValueError(
            "replay_routing: expected -1 for all k of a token and layer, whose router then chooses itself, or for "
            "none; got -1 next to experts"
        )
    ordered_TLK = ids_TLK.sort(-1).values
    if bool(((ordered_TLK.diff(dim=-1) == 0) & (ordered_TLK[..., 1:] >= 0)).any()):
        raise ValueError(
            "replay_routing: expected different experts for each token, got one twice. Where an engine fills tokens "
            "without routing with zeros, set them to -1"
        )
