"""What the presets would send and lose for the same model, each with its own planners. N nodes of one rank each.

Experts of a preset that names no placement train on one node each. In all of them, as in `choose_copies`, a transfer
takes the network of both its ends, versions n steps apart lose (n - 1) / 2 steps on average, and a step in which a node
fails is repeated anyway. Where no copy is left, all go back to a full checkpoint in the store (`pec`: to its own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evermoe.cli.plan.auto_plan import AutoReport, Layout
from evermoe.planning import (
    PRESET_NAMES,
    PRESETS,
    ModelSize,
    PresetName,
    TokenLedger,
    checkpoint_bytes,
    copy_holders,
    copy_recovery_probability,
    place,
    recovery_probability,
    select_experts,
    training_copy_holders,
)
from evermoe.planning.schedule import ChunkPolicy, ChunkReason, CopyItem, Memory, Receiver, plan_chunks

BUFFERS = 4
BUFFER_BYTES = 32 << 20
"""A chunk at most, unless there would be more than `MOST_CHUNKS`."""
MOST_CHUNKS = 1 << 17
LEDGER_TOKENS = 1 << 24
"""Tokens of a layer in a step: the ledger counts integers."""
ROUNDS = 64
"""Selections over which means are taken, and in which every expert has its turn."""

Sizes = list[list[int]]
"""For each node the bytes of each unit that it sends to each of its holders in a step."""


@dataclass(frozen=True)
class PresetRow:
    """What one preset costs and loses."""

    preset: PresetName
    peer_bytes: float
    """Sent to peers in a step, for each parameter of the model."""
    store_bytes: float
    """Sent to the store in a step, for each parameter of the model, on average."""
    steps_per_version: float | None
    """Steps from one copy of the worst unit to its next, on peers or else in the store; None without copies."""
    delay: float | None
    """Share of a step by which it takes longer; None if no planner knows."""
    steps_in_windows: int | None
    """Steps that a step's bytes take without delay; None if more than 4096, or if no planner knows."""
    survives: float
    """Probability that one lost domain leaves a copy of everything, without the store."""
    repeated_steps: float
    """Steps that the job repeats when one node fails, on average."""
    lost_steps: float
    """Tokens lost for ever when one fails, on average, in steps of the whole model: units that go back alone."""


def compare_presets(layout: Layout, auto: AutoReport) -> list[PresetRow]:
    """In the order of `PRESET_NAMES`.

    Raises:
        ValueError: from a planner: what cannot be planned.
    """
    rows = {
        "gemini": _snapshots(layout, "gemini", _group_holders(layout)),
        "pec": _pec(layout),
        "baft": _snapshots(layout, "baft", _previous_stage(layout)),
        "moetion": _moetion(layout),
        "lazarus": _lazarus(layout),
        "auto": _auto(auto),
    }
    return [rows[name] for name in PRESET_NAMES]


# ---- who has what


def single_nodes(layout: Layout) -> NDArray[np.int64]:
    """[L, E] the node of each expert's only replica: blocks of consecutive experts, shifted by one node a layer."""
    layers, experts = layout.share_LE.shape
    blocks_E = np.arange(experts) * layout.cluster.nodes // experts
    return (blocks_E + np.arange(layers)[:, None]) % layout.cluster.nodes


def _group_holders(layout: Layout) -> list[list[int]]:
    return copy_holders([f"node{node:07}" for node in range(layout.cluster.nodes)], layout.setting.copies_wanted)


def _previous_stage(layout: Layout) -> list[list[int]]:
    nodes = layout.cluster.nodes
    return [[node, (node - 1) % nodes][: min(nodes, 2)] for node in range(nodes)]


def _kept_by_one(layout: Layout, holders: Sequence[Sequence[int]]) -> float:
    """Probability that one lost domain leaves a holder of everything."""
    return float(copy_recovery_probability(holders, 1, nodes=layout.domains))


def _stored(layout: Layout) -> float:
    """Steps that the store lags on average."""
    return (layout.setting.persist_steps - 1) / 2


# ---- the presets


def _snapshots(layout: Layout, name: PresetName, holders: list[list[int]]) -> PresetRow:
    """Everything, once in all, after each step."""
    setting, nodes_LE = layout.setting, single_nodes(layout)
    expert = setting.expert_parameters * setting.state_bytes
    counts_N = np.bincount(nodes_LE.ravel(), minlength=layout.cluster.nodes)
    sizes = [
        [expert] * int(count) + [size * setting.state_bytes] * int(size > 0)
        for count, size in zip(counts_N, layout.dense, strict=True)
    ]
    reason = _schedule(layout, PRESETS[name].schedule or "gemini", sizes, holders)
    survives = _kept_by_one(layout, holders)
    lag = ((reason.steps_per_version if reason else 1) - 1) / 2
    return PresetRow(
        name,
        _sent(sizes, holders) / layout.parameters,
        _full_store_bytes(layout),
        _version(reason, sizes, holders),
        _delay(layout, reason),
        reason.steps_in_windows if reason else 1,
        survives,
        survives * lag + (1 - survives) * _stored(layout),
        0.0,
    )


def _version(reason: ChunkReason | None, sizes: Sizes, holders: Sequence[Sequence[int]]) -> float | None:
    if not _sent(sizes, holders):
        return None
    return float(reason.steps_per_version) if reason else 1.0


def _pec(layout: Layout) -> PresetRow:
    """K experts of each layer by load and all of the rest each `persist_steps`; only a lost node's go back further."""
    setting, (layers, experts) = layout.setting, layout.share_LE.shape
    each = setting.pec_experts or -(-experts // 8)
    tokens_LE = _tokens(layout) * setting.persist_steps
    ledger, turns = TokenLedger(layers, experts), -(-experts // each)
    at_risk, oldest = [], 0
    for number in range(4 * turns):
        ledger.add(tokens_LE)
        chosen = select_experts(
            "load-aware", ledger.at_risk, ledger.checkpoint, waiting=ledger.waiting, experts_per_layer=each
        )
        ledger.copied(chosen)
        if number >= 3 * turns:  # by then each had its turn
            at_risk.append(_in_steps(layout, ledger.at_risk))
            oldest = max(oldest, int(ledger.waiting.max()) + 1)
    stored = checkpoint_bytes(_model_size(layout), "pec", experts_per_layer=each).total_bytes
    return PresetRow(
        "pec",
        0.0,
        stored / setting.persist_steps / layout.parameters,
        float(oldest * setting.persist_steps),
        None,
        None,
        0.0,
        _stored(layout),
        float(np.mean(at_risk)) / len(layout.cluster.domains),
    )


def _moetion(layout: Layout) -> PresetRow:
    """The experts with the most tokens at risk that links have time for; gradients where the copy is one step old."""
    setting, cluster = layout.setting, layout.cluster
    ranks = [f"node{node:07}" for node in range(cluster.nodes)]
    copies = min(setting.copies_wanted, cluster.nodes)
    holders = training_copy_holders(ranks, [0] * cluster.nodes, range(cluster.nodes), copies).parameters
    shared = training_copy_holders(ranks, range(cluster.nodes), [0] * cluster.nodes, copies, zero_stage=0).parameters
    survives = _kept_by_one(layout, holders)
    if setting.dense == "replicated" and any(layout.dense):
        survives = min(survives, _kept_by_one(layout, shared))
    run = _run_budget(layout, holders)
    dense = [0] * cluster.nodes
    if setting.dense == "sharded":
        dense = [size * (setting.state_bytes if setting.no_replay else setting.gradient_bytes) for size in layout.dense]
    sizes = [[size for size in (round(expert), rest) if size] for expert, rest in zip(run.sent_N, dense, strict=True)]
    reason = _schedule(layout, PRESETS["moetion"].schedule or "moetion", sizes, holders)
    return PresetRow(
        "moetion",
        _sent(sizes, holders) / layout.parameters,
        _full_store_bytes(layout),
        run.oldest,
        _delay(layout, reason),
        reason.steps_in_windows if reason else 1,
        survives,
        (1 - survives) * _stored(layout),
        survives * run.at_risk / len(cluster.domains),
    )


@dataclass(frozen=True)
class _BudgetRun:
    """What selection by budget comes to, on average over its last rounds."""

    sent_N: NDArray[np.float64]
    """Bytes of experts that each node sends to each of its holders in a step."""
    at_risk: float
    """Tokens at risk, in steps of the whole model."""
    oldest: float | None
    """Steps from one copy of an expert to the next, the worst of those with tokens; None if none is copied."""


def _run_budget(layout: Layout, holders: Sequence[Sequence[int]]) -> _BudgetRun:
    """Runs the selection until all had their turn; where that takes many steps, several steps are one round."""
    setting, cluster, nodes_LE = layout.setting, layout.cluster, single_nodes(layout)
    state, gradient = (setting.expert_parameters * each for each in (setting.state_bytes, setting.gradient_bytes))
    receivers = max(1, max(len(ranks) for ranks in holders) - 1)
    seconds = (setting.network_idle + setting.budget) * setting.step_seconds
    budget = int(cluster.nodes * seconds * setting.network.beta / 2 / receivers) if cluster.nodes > 1 else 0
    per_round = max(-(-nodes_LE.size * state // ROUNDS), state)
    steps = max(1, -(-per_round // max(budget, 1)))
    if budget == 0 or steps > setting.persist_steps:  # the store is sooner
        return _BudgetRun(np.zeros(cluster.nodes), _stored(layout), None)
    tokens_LE, ledger = _tokens(layout) * steps, TokenLedger(*nodes_LE.shape)
    before_LE, age_LE = np.zeros(nodes_LE.shape, bool), np.zeros(nodes_LE.shape)
    sent_N, at_risk, oldest = np.zeros(cluster.nodes), [], 0
    for number in range(3 * ROUNDS):
        ledger.add(tokens_LE)
        chosen_LE = np.zeros(nodes_LE.shape, bool)
        selected = select_experts("budget", ledger.at_risk, budget_bytes=budget * steps, expert_bytes=state)
        for chosen_E, experts in zip(chosen_LE, selected, strict=True):
            chosen_E[experts] = True
        ledger.copied(selected)
        age_LE = np.where(chosen_LE, 0, age_LE + (tokens_LE > 0))
        if number >= 2 * ROUNDS:
            by_gradient_LE = chosen_LE & before_LE if steps == 1 and not setting.no_replay else np.zeros_like(chosen_LE)
            bytes_LE = np.where(by_gradient_LE, gradient, np.where(chosen_LE, state, 0))
            sent_N += np.bincount(nodes_LE.ravel(), weights=bytes_LE.ravel(), minlength=cluster.nodes)
            at_risk.append(_in_steps(layout, ledger.at_risk))
            oldest = max(oldest, int(age_LE.max()) + 1)
        before_LE = chosen_LE
    mean = float(np.mean(at_risk)) + (steps - 1) / 2
    return _BudgetRun(sent_N / (ROUNDS * steps), min(mean, _stored(layout)), float(oldest * steps))


def _lazarus(layout: Layout) -> PresetRow:
    """Active replicas alone, and the store."""
    cluster, setting = layout.cluster, layout.setting
    policy = PRESETS["lazarus"].placement or "balanced"
    matrices = [
        place(matrix.sum(0), cluster.nodes, cluster.slots, policy, load=share_E, domains=cluster.domains).matrix
        for share_E, matrix in zip(layout.share_LE, layout.matrices, strict=True)
    ]
    if setting.dense == "sharded" and any(layout.dense):
        matrices.append(np.diag([int(size > 0) for size in layout.dense])[:, [size > 0 for size in layout.dense]])
    survives = float(recovery_probability(np.hstack(matrices), 1, domains=cluster.domains))
    return PresetRow(
        "lazarus",
        0.0,
        _full_store_bytes(layout),
        float(setting.persist_steps),
        0.0,
        1,
        survives,
        (1 - survives) * _stored(layout),
        0.0,
    )


def _auto(auto: AutoReport) -> PresetRow:
    """What `choose_copies` says; a unit without any copy takes the job back to the store, as the session does."""
    layout, plan = auto.layout, auto.plan
    setting, cluster = layout.setting, layout.cluster
    failure = setting.copy_nodes(1, 1)[0].failure
    failures = sum(1 - (1 - failure) ** len(domain) for domain in cluster.domains)  # in a step
    copied = [choice for choice in plan.units if choice.holders]
    survives = float(plan.survival[0].with_loss)
    return PresetRow(
        "auto",
        auto.bytes / layout.parameters,
        _full_store_bytes(layout),
        float(max((choice.period for choice in copied), default=1)) if copied else None,
        plan.delay_seconds / setting.step_seconds,
        None if plan.delay_seconds else 1,
        survives,
        (1 - survives) * _stored(layout),
        sum(choice.lost_tokens for choice in copied) / failures / layout.steps_tokens,
    )


# ---- shared


def _schedule(
    layout: Layout, policy: ChunkPolicy, sizes: Sizes, holders: Sequence[Sequence[int]]
) -> ChunkReason | None:
    """Chunks of the node whose network has the most to do, sending and receiving; None if there is nothing to send."""
    nodes = range(layout.cluster.nodes)
    totals = [sum(size) for size in sizes]
    sources = [[rank for rank in nodes if rank != node and node in holders[rank]] for node in nodes]
    traffic = [totals[n] * (len(holders[n]) - 1) + sum(totals[rank] for rank in sources[n]) for n in nodes]
    node = max(nodes, key=lambda each: traffic[each])
    if traffic[node] == 0:
        return None
    peers = [rank for rank in holders[node] if rank != node]
    pieces = [
        CopyItem(f"to {peer}: {number}", size, [peer]) for peer in peers for number, size in enumerate(sizes[node])
    ]
    pieces += [
        CopyItem(f"from {rank}: {number}", size, [rank])
        for rank in sources[node]
        for number, size in enumerate(sizes[rank])
    ]
    windows = layout.setting.windows(len(layout.share_LE))
    buffer = max(BUFFER_BYTES, -(-traffic[node] // MOST_CHUNKS))
    receivers = [Receiver(rank, windows) for rank in sorted({*peers, *sources[node]})]
    memory = Memory(BUFFERS * buffer, BUFFERS)
    return plan_chunks(pieces, windows, layout.setting.network, memory, policy=policy, receivers=receivers).reason


def _sent(sizes: Sizes, holders: Sequence[Sequence[int]]) -> int:
    """Over all nodes in a step."""
    return sum(sum(size) * (len(ranks) - 1) for size, ranks in zip(sizes, holders, strict=True))


def _delay(layout: Layout, reason: ChunkReason | None) -> float:
    return reason.delay_seconds / layout.setting.step_seconds if reason else 0.0


def _tokens(layout: Layout) -> NDArray[np.int64]:
    """[L, E] of a step, for the ledger."""
    return np.rint(layout.share_LE * LEDGER_TOKENS).astype(np.int64)


def _in_steps(layout: Layout, tokens_LE: NDArray[np.int64]) -> float:
    """Tokens as steps of the whole model."""
    return float(tokens_LE.sum()) / LEDGER_TOKENS / layout.steps_tokens


def _model_size(layout: Layout) -> ModelSize:
    setting, (layers, experts) = layout.setting, layout.share_LE.shape
    return ModelSize(
        non_expert_parameters=sum(layout.dense),
        layers=layers,
        experts=experts,
        expert_parameters=setting.expert_parameters,
        weight_bytes=0,
        optimizer_bytes=setting.state_bytes,
        gradient_bytes=setting.gradient_bytes,
    )


def _full_store_bytes(layout: Layout) -> float:
    full = checkpoint_bytes(_model_size(layout), "full").total_bytes
    return full / layout.setting.persist_steps / layout.parameters
