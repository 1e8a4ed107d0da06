"""Bytes and losses of each preset for one model, as its sessions would have them. N nodes of one rank each.

In every preset `place` decides where experts train, with as many replicas as there are slots, and `plan_protection`
decides who keeps which copies, as in a session. As in `choose_copies`, a transfer takes the network of both its
ends, versions n steps apart lose (n - 1) / 2 steps on average, and a step in which a node fails is repeated. If no
copy is left, all members return to a full checkpoint in the store; in `pec`, to its saved units.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from evermoe.cli.plan.auto_plan import AutoReport, Layout
from evermoe.cli.plan.turns import run_turns
from evermoe.planning import CopyUnit, place
from evermoe.planning.budgets import budgets_of
from evermoe.planning.holders import primaries
from evermoe.planning.ledger import TokenLedger
from evermoe.planning.presets import PRESET_NAMES, PRESETS, PresetName, levels
from evermoe.planning.protection import RankInfo, UnitInfo, UnitProtection, plan_protection
from evermoe.planning.schedule import ChunkPolicy, ChunkReason, CopyItem, Receiver, forecast_memory, plan_chunks
from evermoe.planning.selection import select_experts
from evermoe.planning.sizes import ModelSize, checkpoint_bytes
from evermoe.planning.survival import copy_recovery_probability

MAX_MODULES, MAX_ACTIVE = 64, 1 << 20
"""Largest number of dense units, and of ranks that train them, summed over units."""
LEDGER_TOKENS = 1 << 24
"""Tokens of a layer in a step. A large number, as the ledger counts integers."""
ROUNDS = 64
"""Number of selections over which means are taken; in it every expert is selected."""

Sends = list[tuple[int, int, int]]
"""(sender, receiver, bytes) of each transfer in a step."""


@dataclass(frozen=True)
class PresetRow:
    """Cost and losses of one preset."""

    preset: PresetName
    peer_bytes: float
    """Bytes sent to peers in a step, per parameter of the model."""
    store_bytes: float
    """Average bytes sent to the store in a step, per parameter of the model."""
    steps_per_version: float | None
    """Steps from one copy of the worst unit to its next, on peers or else in the store; None without copies."""
    delay: float | None
    """Share of a step by which copies prolong it; None if no planner knows it."""
    steps_in_windows: int | None
    """Steps that the bytes of one step take within windows alone; None if more than 4096, or if no planner knows it."""
    survives: float
    """Probability that a copy of everything remains in memory after the loss of one domain."""
    repeated_steps: float
    """Average number of steps that the job repeats when one node fails."""
    lost_steps: float
    """Average tokens lost for good when one node fails, in steps of the complete model, from units that go back
    alone."""
    experts_per_snapshot: int | None = None
    """Experts of each layer in a snapshot in own memory; None for presets without such levels."""
    experts_per_save: int | None = None
    """Experts of each layer in a save to the store; None for presets without such levels."""
    restart_lost_steps: float | None = None
    """As `lost_steps`, if all processes end and all nodes survive; None for presets without such levels."""


def compare_presets(layout: Layout, auto: AutoReport) -> list[PresetRow]:
    """Return a row for each preset, in the order of `PRESET_NAMES`.

    Raises:
        ValueError: from a planner: what cannot be planned.
    """
    rows = {
        "gemini": _snapshots(layout, "gemini"),
        "pec": _pec(layout),
        "baft": _snapshots(layout, "baft"),
        "moetion": _moetion(layout),
        "lazarus": _lazarus(layout),
        "auto": _auto(auto),
    }
    return [rows[name] for name in PRESET_NAMES]


# ---- holders


@dataclass(frozen=True)
class _Kept:
    """Units of a model, and their protection by a preset."""

    layout: Layout
    units: list[CopyUnit]
    plans: list[UnitProtection]

    @property
    def survives(self) -> float:
        """Probability that a holder of everything remains in memory after the loss of one domain."""
        sets = {frozenset([*unit.active, *kept.holders]) for unit, kept in zip(self.units, self.plans, strict=True)}
        holders = sorted(sorted(nodes) for nodes in sets)
        return float(copy_recovery_probability(holders, 1, nodes=self.layout.domains))

    def is_dense_active(self) -> bool:
        """Whether an active holder of every dense unit remains after the loss of one domain."""
        return all(self._num_domains(unit) > 1 for unit in self.units[self.layout.share_LE.size :])

    def single_LE(self) -> NDArray[np.bool_]:
        """[L, E] experts that only one domain trains."""
        experts = self.units[: self.layout.share_LE.size]
        found = np.array([self._num_domains(unit) == 1 for unit in experts])
        return found.reshape(self.layout.share_LE.shape)

    def _num_domains(self, unit: CopyUnit) -> int:
        return len({node // self.layout.cluster.domain_size for node in unit.active})


def _keep(layout: Layout, name: PresetName) -> _Kept:
    """Return the protection of a session whose nodes have room for everything; the dense part has one unit per node."""
    nodes, setting, experts = layout.cluster.nodes, layout.setting, layout.share_LE.size
    units = layout.units()
    if setting.dense == "replicated" and len(units) > experts:
        active, number = units[-1].active, max(1, min(nodes, MAX_MODULES, MAX_ACTIVE // nodes))
        parts = [each - before for before, each in pairwise(sum(layout.dense) * n // number for n in range(number + 1))]
        sizes = [(part * setting.state_bytes, part * setting.gradient_bytes) for part in parts if part]
        units[experts:] = [CopyUnit(*each, active, units[-1].tokens, units[-1].replayable) for each in sizes]
    infos = [
        UnitInfo(str(number), unit.state_bytes, unit.gradient_bytes, tuple(unit.active), unit.tokens, unit.replayable)
        for number, unit in enumerate(units)
    ]
    ranks = [RankInfo(f"node{node:07}", 1 << 62) for node in range(nodes)]
    plan = plan_protection(name, infos, ranks, replication=setting.replication, budget=setting.budget)
    return _Kept(layout, units, plan.units)


def _stored(layout: Layout) -> float:
    """Average number of steps by which the store lags."""
    return (layout.setting.persist_steps - 1) / 2


# ---- the presets


def _snapshots(layout: Layout, name: PresetName) -> PresetRow:
    """Return the row of a preset that copies everything once after each step."""
    kept = _keep(layout, name)
    sends = [
        (each.primary, holder, unit.state_bytes)
        for unit, each in zip(kept.units, kept.plans, strict=True)
        for holder in each.holders
    ]
    reason = _schedule(layout, PRESETS[name].schedule or "gemini", sends)
    survives = kept.survives
    lag = ((reason.steps_per_version if reason else 1) - 1) / 2
    return PresetRow(
        name,
        _sent(sends) / layout.parameters,
        _full_store_bytes(layout),
        float(reason.steps_per_version) if reason else None,
        _delay(layout, reason),
        reason.steps_in_windows if reason else 1,
        survives,
        survives * lag + (1 - survives) * _stored(layout),
        0.0,
    )


def _pec(layout: Layout) -> PresetRow:
    """Return the row of `pec`: K experts of each layer by load, and all dense units each `persist_steps`.

    Snapshots in own memory are lost with their node. If all processes end and the nodes survive, all experts go back
    to these snapshots.
    """
    setting, kept = layout.setting, _keep(layout, "pec")
    each = levels(layout.share_LE.shape[1], setting.experts_per_snapshot, setting.experts_per_save)
    active = [list(unit.active) for unit in kept.units[: layout.share_LE.size]]
    ranks = primaries(active, [1] * len(active), layout.cluster.nodes)
    rank_LE = np.array(ranks, np.int64).reshape(layout.share_LE.shape)
    saved = run_turns(_tokens(layout) * setting.persist_steps, rank_LE, each.save)
    in_memory = run_turns(_tokens(layout) * setting.snapshot_interval, rank_LE, each.snapshot)
    single_LE = kept.single_LE()
    # An expert that no other node trains goes back alone. If a dense unit goes back, all go back with it.
    alone = kept.is_dense_active()
    since = _in_steps(layout, np.where(single_LE, _tokens(layout), 0)) * _stored(layout) if alone else 0.0
    stored = checkpoint_bytes(_model_size(layout), "pec", experts_per_layer=each.save).total_bytes
    return PresetRow(
        "pec",
        0.0,
        stored / setting.persist_steps / layout.parameters,
        float(saved.most_between * setting.persist_steps),
        None,
        None,
        kept.survives,
        0.0 if alone else _stored(layout),
        (_in_steps(layout, np.where(single_LE, saved.at_risk_LE, 0)) + since) / len(layout.cluster.domains),
        *each,
        _in_steps(layout, in_memory.at_risk_LE),
    )


def _moetion(layout: Layout) -> PresetRow:
    """Return the row of `moetion`: of the experts that one node alone trains, those with most tokens at risk.

    The budget decides how many. Where the copy is one step old, gradients are sent instead of the state.
    """
    setting, kept = layout.setting, _keep(layout, "moetion")
    survives, run = kept.survives, _run_budget(kept)
    experts, sends = layout.share_LE.size, run.sends
    for unit, each in zip(kept.units[experts:], kept.plans[experts:], strict=True):
        size = unit.state_bytes if setting.no_replay else unit.gradient_bytes
        sends += [(each.primary, holder, size) for holder in each.holders]
    reason = _schedule(layout, PRESETS["moetion"].schedule or "moetion", sends)
    return PresetRow(
        "moetion",
        _sent(sends) / layout.parameters,
        _full_store_bytes(layout),
        run.oldest,
        _delay(layout, reason),
        reason.steps_in_windows if reason else 1,
        survives,
        (1 - survives) * _stored(layout),
        survives * run.at_risk / len(layout.cluster.domains),
    )


@dataclass(frozen=True)
class _BudgetRun:
    """Result of selection by budget, averaged over its last rounds."""

    sends: Sends
    """Bytes that each node sends to each other one in a step."""
    at_risk: float
    """Tokens at risk, in steps of the complete model."""
    oldest: float | None
    """Most steps from one copy of an expert with tokens to its next; None if none is copied."""


def _run_budget(kept: _Kept) -> _BudgetRun:
    """Run the selection until every expert was selected; where that takes many steps, a round is several steps."""
    layout = kept.layout
    setting, shape = layout.setting, layout.share_LE.shape
    state, gradient = (setting.expert_parameters * each for each in (setting.state_bytes, setting.gradient_bytes))
    plans = kept.plans[: layout.share_LE.size]
    followed_LE = np.array([bool(each.holders) for each in plans]).reshape(shape)
    budget = setting.remote_bytes_per_step
    if budget is None:
        budget = budgets_of(setting.step_seconds, [setting.network.beta] * layout.cluster.nodes, []).remote or 0
    followed = _in_steps(layout, np.where(followed_LE, _tokens(layout), 0))
    if budget < state:  # none of them fits
        return _BudgetRun([], _stored(layout) * followed, None)
    steps = max(1, math.ceil(int(followed_LE.sum()) * state / ROUNDS / budget))
    tokens_LE = np.where(followed_LE, _tokens(layout) * steps, 0)
    ledger = TokenLedger(*shape)
    before_LE, age_LE = np.zeros(shape, bool), np.zeros(shape)
    sent_LE, at_risk, oldest = np.zeros(shape), [], 0
    for number in range(3 * ROUNDS):
        ledger.add(tokens_LE)
        chosen_LE = np.zeros(shape, bool)
        selected = select_experts("budget", ledger.at_risk, budget_bytes=budget * steps, expert_bytes=state)
        for chosen_E, experts in zip(chosen_LE, selected, strict=True):
            chosen_E[experts] = True
        ledger.copied(selected)
        age_LE = np.where(chosen_LE, 0, age_LE + (tokens_LE > 0))
        if number >= 2 * ROUNDS:
            by_gradient_LE = chosen_LE & before_LE if steps == 1 and not setting.no_replay else np.zeros_like(chosen_LE)
            sent_LE += np.where(by_gradient_LE, gradient, np.where(chosen_LE, state, 0))
            at_risk.append(_in_steps(layout, ledger.at_risk))
            oldest = max(oldest, int(age_LE.max()) + 1)
        before_LE = chosen_LE
    sizes = np.rint(sent_LE / (ROUNDS * steps)).astype(int).ravel().tolist()
    sends = [(each.primary, holder, size) for each, size in zip(plans, sizes, strict=True) for holder in each.holders]
    mean = min(float(np.mean(at_risk)) + (steps - 1) / 2 * followed, _stored(layout) * followed)
    return _BudgetRun(sends, mean, float(oldest * steps) if sends else None)


def _lazarus(layout: Layout) -> PresetRow:
    """Return the row of `lazarus`: active replicas, and the store."""
    cluster, setting = layout.cluster, layout.setting
    policy = PRESETS["lazarus"].placement
    matrices = tuple(
        place(matrix.sum(0), cluster.nodes, cluster.slots, policy, load=share_E, domains=cluster.domains).matrix
        for share_E, matrix in zip(layout.share_LE, layout.matrices, strict=True)
    )
    survives = _keep(replace(layout, matrices=matrices), "lazarus").survives
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
    """Return the row of `auto` from `choose_copies`; if a unit has no copy, the job returns to the store, as in a
    session."""
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


def _schedule(layout: Layout, policy: ChunkPolicy, sends: Sends) -> ChunkReason | None:
    """Schedule the chunks of the node whose network has the most to do; None if nothing is sent."""
    traffic = np.zeros(layout.cluster.nodes, np.int64)
    for sender, receiver, size in sends:
        traffic[[sender, receiver]] += size
    node = int(traffic.argmax())
    if traffic[node] == 0:
        return None
    pieces = [
        CopyItem(f"to {receiver}: {number}", size, [receiver])
        for number, (sender, receiver, size) in enumerate(sends)
        if sender == node and size
    ]
    pieces += [
        CopyItem(f"from {sender}: {number}", size, [sender])
        for number, (sender, receiver, size) in enumerate(sends)
        if receiver == node and size
    ]
    windows = layout.setting.windows(len(layout.share_LE))
    receivers = [Receiver(rank, windows) for rank in sorted({peer for piece in pieces for peer in piece.destinations})]
    memory = forecast_memory(int(traffic[node]))
    return plan_chunks(pieces, windows, layout.setting.network, memory, policy=policy, receivers=receivers).reason


def _sent(sends: Sends) -> int:
    """Return the bytes over all nodes in a step."""
    return sum(size for _, _, size in sends)


def _delay(layout: Layout, reason: ChunkReason | None) -> float:
    return reason.delay_seconds / layout.setting.step_seconds if reason else 0.0


def _tokens(layout: Layout) -> NDArray[np.int64]:
    """Return the tokens of a step for the ledger, [L, E]."""
    return np.rint(layout.share_LE * LEDGER_TOKENS).astype(np.int64)


def _in_steps(layout: Layout, tokens_LE: NDArray[np.int64] | NDArray[np.float64]) -> float:
    """Return tokens in steps of the complete model."""
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
