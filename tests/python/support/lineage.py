"""Steps that each expert has seen, from what all workers have recorded: tokens of each step, and digests.

Nothing here knows how a session counts. An update takes the state of a version to that of the next one, and adds the
step's tokens to what each expert has processed. After a recovery, an expert has processed what it had where its bytes
were recorded before; the rest of what it had processed is lost.

    version 1.4 ─ update ─ 1.5 ─ update ─ 1.6     expert 3 has the bytes of 1.4 in 2.6: it has lost what it
                                           └ 2.6  got in two steps
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from evermoe.state.version import step_of
from support.harness import Event, Worker

DENSE = "embedding"
"""A unit that all workers have, and that each step changes."""


@dataclass
class State:
    """A version of the state, as workers recorded it."""

    version: int
    contents: dict[str, int] = field(default_factory=dict)
    """Digests by unit."""
    parents: set[int] = field(default_factory=set)
    """Versions that an update took to this one."""
    tokens: dict[str, list[int]] = field(default_factory=dict)
    """Tokens by layer and expert of the update."""
    each: list[int] = field(default_factory=list)
    """Experts of each layer that are saved, and of which snapshots are made, at a time."""
    ledgers: set[str] = field(default_factory=set)
    """Counts of the members after the update, as JSON."""
    base: State | None = None
    """After a recovery, the state whose units it took that are no experts."""
    total: dict[str, int] = field(default_factory=dict)
    """Tokens by expert, of the steps that led here."""
    processed: dict[str, int] = field(default_factory=dict)
    """Tokens by expert that its bytes have seen."""
    lost_now: dict[str, int] = field(default_factory=dict)
    """Tokens by expert that the recovery to this version lost."""

    @property
    def plt(self) -> float:
        """Portion of lost tokens, averaged over layers."""
        total, lost = defaultdict(int), defaultdict(int)
        for unit, tokens in self.total.items():
            layer = unit.rsplit(".", 1)[0]
            total[layer] += tokens
            lost[layer] += tokens - self.processed[unit]
        return sum(lost[layer] / max(total[layer], 1) for layer in total) / len(total)


@dataclass(frozen=True)
class Recovery:
    """One that has been checked."""

    state: State
    reports: list[Event]
    is_new: bool
    """Whether the state is a new one, as experts are older than the rest."""


def _read(workers: Iterable[Worker]) -> tuple[dict[int, State], dict[int, list[Event]]]:
    """All states by version, and the reports of all recoveries by the version from which the members resumed."""
    states: dict[int, State] = {}
    reports: dict[int, list[Event]] = defaultdict(list)
    for each in workers:
        version = None
        for event in each.events():
            if event["event"] == "recovered":
                assert version is not None
                reports[version].append(event)
            if event["event"] != "copy":
                continue
            before, version = version, event["version"]
            state = states.setdefault(version, State(version))
            for unit, value in event["contents"].items():
                assert state.contents.setdefault(unit, value) == value, f"{unit} of {version:x} differs"
            state.each = event["each"]
            if event["after"] == "update":
                assert before is not None
                state.parents.add(before)
                state.ledgers.add(event["ledger"])
                assert (state.tokens or event["tokens"]) == event["tokens"], f"tokens of {version:x} differ"
                state.tokens = event["tokens"]
    return states, reports


def _fill(states: dict[int, State]) -> None:
    """Finds what each expert has processed in each state, older ones first."""
    known: dict[str, dict[int, int]] = defaultdict(dict)
    experts = [unit for unit in states[min(states)].contents if ".experts." in unit]
    for version in sorted(states):
        state = states[version]
        if state.parents:
            (parent,) = (states[each] for each in state.parents)
            for unit in experts:
                layer, expert = unit.rsplit(".", 1)
                got = state.tokens[layer][int(expert)]
                state.total[unit] = parent.total[unit] + got
                state.processed[unit] = parent.processed[unit] + got
        else:
            _resume(state, states, known, experts)
        for unit in experts:
            if unit in state.contents:
                processed = known[unit].setdefault(state.contents[unit], state.processed[unit])
                assert processed == state.processed[unit], f"{unit} of {version:x}"


def _resume(state: State, states: dict[int, State], known: dict[str, dict[int, int]], experts: list[str]) -> None:
    if not step_of(state.version) and not any(known.values()):
        state.total, state.processed = dict.fromkeys(experts, 0), dict.fromkeys(experts, 0)
        return
    found = [
        each
        for each in states.values()
        if each.version < state.version and each.contents.get(DENSE) == state.contents[DENSE] and each.processed
    ]
    base = state.base = max(found, key=lambda each: each.version)
    state.total = dict(base.total)
    for unit in experts:
        value = state.contents[unit]
        assert value in known[unit], f"{unit} of {state.version:x} has bytes that were never recorded"
        state.processed[unit] = known[unit][value]
        lost = base.processed[unit] - state.processed[unit]
        assert lost >= 0
        if lost:
            state.lost_now[unit] = lost


def check_losses(workers: Iterable[Worker]) -> list[Recovery]:
    """Every report of a recovery says what was lost, and all members have the same ledger at each version."""
    workers = list(workers)
    states, reports = _read(workers)
    _fill(states)
    found = []
    for version, events in sorted(reports.items()):
        state = states[version]
        is_new = not state.parents and state.base is not None
        for event in events:
            assert event["step"] == step_of(version)
            lost = {unit: tokens for unit, tokens in event["lost_tokens"].items() if tokens}
            assert lost == (state.lost_now if is_new else {}), f"{version:x}"
            assert abs(event["plt"] - state.plt) < 1e-12, (f"{version:x}", event["plt"], state.plt)
            assert is_new or not event["stale"]
            for unit, step in event["stale"].items():
                same = [each for each in states.values() if each.contents.get(unit) == state.contents[unit]]
                assert step in {step_of(each.version) for each in same}, (f"{version:x}", unit)
            if is_new:
                assert state.lost_now.keys() <= event["stale"].keys()
        found.append(Recovery(state, events, is_new))
    for state in states.values():
        assert len(state.ledgers) <= 1, f"members count otherwise at {state.version:x}"
    return found
