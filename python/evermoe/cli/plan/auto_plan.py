"""Protection of each unit by `auto`: the plan of `choose_copies` for a complete model. L layers, E experts, N nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from evermoe.cli.plan.advice import best
from evermoe.cli.plan.compare import Cluster, Comparison, Result
from evermoe.cli.plan.setting import CopySetting
from evermoe.planning import CopyUnit, choose_copies
from evermoe.planning.choose_copies import CopyKind, CopyPlan, LossSurvival, NodeUse, UnitChoice
from evermoe.planning.presets import PRESETS
from evermoe.planning.protection import LOG_STEPS, MAX_PERIOD
from evermoe.planning.selection import shard_modules
from evermoe.planning.survival import copy_recovery_probability


@dataclass(frozen=True)
class Layout:
    """Units of a model, and the nodes that train them."""

    cluster: Cluster
    setting: CopySetting
    share_LE: NDArray[np.float64]
    """[L, E] share of the tokens of its layer; 0 in a layer without load."""
    matrices: tuple[NDArray[np.int64], ...]
    """[N, E] of each layer."""
    dense: tuple[int, ...]
    """Dense parameters in each node's shard; if replicated, each node has all of them."""

    @property
    def steps_tokens(self) -> float:
        """Tokens of a step, where each layer counts as 1."""
        return max(1.0, float(self.share_LE.sum()))

    @property
    def parameters(self) -> int:
        """Parameters of the model, each counted once."""
        return self.share_LE.size * self.setting.expert_parameters + sum(self.dense)

    @property
    def domains(self) -> list[str]:
        """Name of each node's domain."""
        return [f"domain{node // self.cluster.domain_size:07}" for node in range(self.cluster.nodes)]

    def unit_name(self, index: int) -> str:
        """Return the name of the unit at this index of `units`."""
        if index < self.share_LE.size:
            layer, expert = divmod(index, self.share_LE.shape[1])
            return f"layer {layer}, expert {expert}"
        return "the dense part" if self.setting.dense == "replicated" else f"dense shard {index - self.share_LE.size}"

    def units(self) -> list[CopyUnit]:
        """The experts, layer by layer, then the dense part, which every token uses."""
        setting, found = self.setting, []
        state, gradient = (setting.expert_parameters * each for each in (setting.state_bytes, setting.gradient_bytes))
        for share_E, matrix in zip(self.share_LE, self.matrices, strict=True):
            for share, column in zip(share_E.tolist(), matrix.T, strict=True):
                active = np.flatnonzero(column).tolist()
                found.append(CopyUnit(state, gradient if share > 0 else 0, active, share, not setting.no_replay))
        rest: list[tuple[int, Sequence[int]]] = [(size, [node]) for node, size in enumerate(self.dense) if size]
        if setting.dense == "replicated":
            rest = [(sum(self.dense), range(self.cluster.nodes))] if sum(self.dense) else []
        for size, nodes in rest:
            sizes = size * setting.state_bytes, size * setting.gradient_bytes
            found.append(CopyUnit(*sizes, nodes, self.steps_tokens, not setting.no_replay))
        return found


@dataclass(frozen=True)
class KindRow:
    """Totals of all units of one kind."""

    kind: CopyKind
    periods: tuple[int, int]
    """Fewest and most steps from one version to the next."""
    experts: int
    others: int
    """Units that are not experts."""
    tokens: float
    """Share of all experts' tokens."""
    bytes: int
    """Bytes sent in a step."""
    window_share: float | None
    """Share of the seconds of all nodes' windows; None if there are no windows."""
    memory_bytes: int
    """Memory that copies take on all nodes."""
    most_lost_steps: int
    """Largest number of lost steps, for fewer losses than the number of copies wanted."""


@dataclass(frozen=True)
class Example:
    """Unit that represents those which are protected in the same way for the same reason."""

    unit: int
    """Index of the unit with the most tokens."""
    number: int
    """Number of units that it represents, itself included."""
    text: str


@dataclass(frozen=True)
class AutoReport:
    """Plan of `auto` for a model."""

    layout: Layout
    policy: str
    """Placement policy."""
    plan: CopyPlan
    kinds: tuple[KindRow, ...]
    survival: tuple[LossSurvival, ...]
    examples: tuple[Example, ...]

    @property
    def busiest(self) -> NodeUse:
        """Return the largest value over all nodes, for each quantity."""
        return NodeUse(*(max(column) for column in zip(*self.plan.nodes, strict=True)))

    @property
    def bytes(self) -> int:
        """Bytes sent in a step, over all nodes."""
        return sum(node.sent_bytes for node in self.plan.nodes)


def make_layout(load_LE: NDArray[np.float64], comparison: Comparison, setting: CopySetting) -> tuple[Layout, Result]:
    """Return the model on the placement of `auto`'s policy if it was compared, else on the recommended one."""
    results = {result.policy: result for result in comparison.results}
    chosen = results.get(PRESETS["auto"].placement) or best(comparison)[0]
    total = load_LE.sum(1, keepdims=True)
    share_LE = np.divide(load_LE, total, out=np.zeros_like(load_LE), where=total > 0)
    parts = shard_modules([setting.dense_parameters], comparison.cluster.nodes, alignment=1)
    dense = tuple(sum(end - start for _, start, end in part) for part in parts)
    return Layout(comparison.cluster, setting, share_LE, chosen.matrices, dense), chosen


def plan_auto(layout: Layout, policy: str) -> AutoReport:
    """Plan the protection and sum it up.

    Raises:
        ValueError: the planner cannot plan this.
    """
    setting, cluster = layout.setting, layout.cluster
    units = layout.units()
    plan = choose_copies(
        units,
        setting.copy_nodes(cluster.nodes, cluster.domain_size),
        network=setting.network,
        host_link=setting.host_link,
        step_seconds=setting.step_seconds,
        replication=setting.replication,
        budget=setting.budget,
        max_period=MAX_PERIOD,
        persist_period=setting.persist_steps,
        log_steps=LOG_STEPS,
    )
    return AutoReport(
        layout,
        policy,
        plan,
        tuple(_kinds(layout, units, plan)),
        tuple(_survival(layout, units, plan)),
        tuple(_examples(layout, units, plan)),
    )


def _kinds(layout: Layout, units: Sequence[CopyUnit], plan: CopyPlan) -> list[KindRow]:
    """Sum up units by kind; snapshots of each step count separately from older ones."""
    groups: dict[tuple[CopyKind, bool], list[int]] = {}
    for index, choice in enumerate(plan.units):
        groups.setdefault((choice.kind, choice.period > 1), []).append(index)
    order: list[CopyKind] = ["active", "replayed", "snapshot", "uncovered"]
    keys = sorted(groups, key=lambda key: (order.index(key[0]), key[1]))
    return [_kind(layout, units, plan, groups[key]) for key in keys]


def _kind(layout: Layout, units: Sequence[CopyUnit], plan: CopyPlan, members: Sequence[int]) -> KindRow:
    setting, experts = layout.setting, layout.share_LE.size
    choices = [plan.units[index] for index in members]
    windows = setting.network_idle * setting.step_seconds * layout.cluster.nodes
    seconds = sum(_network_seconds(layout, choice) for choice in choices)
    return KindRow(
        choices[0].kind,
        (min(choice.period for choice in choices), max(choice.period for choice in choices)),
        sum(index < experts for index in members),
        sum(index >= experts for index in members),
        sum(units[index].tokens for index in members if index < experts) / layout.steps_tokens,
        sum(choice.bytes for choice in choices),
        seconds / windows if windows else None,
        sum(choice.memory_bytes for choice in choices),
        max(0 if choice.covered else choice.most_lost_steps for choice in choices),
    )


def _network_seconds(layout: Layout, choice: UnitChoice) -> float:
    """Network seconds of a unit in a step, at both ends."""
    if not choice.bytes:
        return 0.0
    link, holders = layout.setting.network, len(choice.holders)
    return 2 * holders * (link.alpha + choice.bytes / holders / link.beta)


def _survival(layout: Layout, units: Sequence[CopyUnit], plan: CopyPlan) -> list[LossSurvival]:
    """Return the survival for each number of losses of `--fail`."""

    def sets(old: bool) -> list[list[int]]:
        found = set()
        for unit, choice in zip(units, plan.units, strict=True):
            copied = [holder.node for holder in choice.holders] if old or choice.period == 1 else []
            found.add(frozenset([*unit.active, *copied]))
        return sorted(sorted(nodes) for nodes in found)

    current, any_version, names = sets(old=False), sets(old=True), layout.domains
    return [
        LossSurvival(
            failures,
            copy_recovery_probability(current, failures, nodes=names),
            copy_recovery_probability(any_version, failures, nodes=names),
        )
        for failures in layout.cluster.failures
    ]


def _examples(layout: Layout, units: Sequence[CopyUnit], plan: CopyPlan) -> list[Example]:
    """Return examples, the most frequent kind first."""
    groups: dict[tuple[bool, CopyKind, int, str, int], list[int]] = {}
    for index, choice in enumerate(plan.units):
        key = index >= layout.share_LE.size, choice.kind, choice.period, choice.reason, len(choice.holders)
        groups.setdefault(key, []).append(index)
    found = []
    for members in groups.values():
        hottest = max(members, key=lambda index: units[index].tokens)
        number = f", the hottest of {len(members):,}" if len(members) > 1 and hottest < layout.share_LE.size else ""
        name = layout.unit_name(hottest) + number
        found.append(Example(hottest, len(members), f"{name}: {_kept(units[hottest], plan.units[hottest])}"))
    return sorted(found, key=lambda example: -example.number)


def _kept(unit: CopyUnit, choice: UnitChoice) -> str:
    """Return one sentence with the planner's reason."""
    active = f"active on {_nodes(unit.active)}"
    holders = _nodes([holder.node for holder in choice.holders])
    often = "each step" if choice.period == 1 else f"every {choice.period} steps"
    what = "no copy"
    if choice.kind == "active":
        what = "nothing to copy"
    elif choice.holders and choice.kind == "replayed":
        what = f"replayed on {holders}" + (", its gradient sent each step" if choice.bytes else ", nothing to send")
    elif choice.holders:
        what = f"its state sent to {holders} {often}"
    return f"{active}: {what}; {choice.summary}"


def _nodes(nodes: Sequence[int]) -> str:
    shown = ", ".join(map(str, list(nodes)[:4]))
    more = f" and {len(nodes) - 4} more" if len(nodes) > 4 else ""
    return f"node{'s' * (len(nodes) > 1)} {shown}{more}"
