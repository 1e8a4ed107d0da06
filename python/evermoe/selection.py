"""Tokens that experts got since they were last copied, what a failure has cost in them, and what is copied next.

The same on all members, as all count the same tokens.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from evermoe import planning
from evermoe.comm.gather import gather_json, share_json
from evermoe.comm.group import Group
from evermoe.keeper import CopyOptions
from evermoe.moe_load import TokenCount
from evermoe.planning import TokenLedger, budgets, presets
from evermoe.state.copy_marks import CHECKPOINT, LOCAL, SAVED, Places
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit
from evermoe.state.version import step_of, version_of

_NOTHING: Mapping[str, int] = MappingProxyType({})
NEWEST = (1 << 63) - 1
"""A version that no other is newer than."""
LATEST_STEPS = 16
"""Steps of which all totals are remembered."""
BOOST = 1.1
"""What the load of experts that lost tokens counts for, until they have got as many again (MoEtion)."""


class LossLedger:
    """Counts the tokens of all experts in the steps that were taken, in `ExpertLoad.tokens`.

    The portion of lost tokens (PLT, of PEC / MoC-System) is the tokens in the updates that recoveries had to give up,
    over all tokens of the run so far, per layer, averaged over layers. What an expert has processed is its tokens
    without those that it lost; `CopyMarks` knows what it had processed in each of its latest copies.

    Args:
        state: with the tokens.
        options: how many experts are copied at a time.
        notes_copies: False where no recovery ever takes an expert at an older version than the rest.
    """

    def __init__(self, state: TrainingState, options: CopyOptions, *, notes_copies: bool = True) -> None:
        self._state, self.marks, self._notes_copies = state, state.expert_load.marks, notes_copies
        self._layers = {path: layer.num_experts for path, layer in state.layers.items()}
        self._latest: deque[tuple[int, NDArray[np.int64]]] = deque(maxlen=LATEST_STEPS)
        """Step and [L, E] processed tokens of the latest steps."""
        most = max(self._layers.values(), default=0)
        each = presets.levels(max(most, 1), options.experts_per_snapshot, options.experts_per_save)
        self.selection, self.local = (
            TokenLedger(len(self._layers), most, experts_per_layer=k, plt_limit=options.plt_limit) if most else None
            for k in (each.save, each.snapshot)
        )
        """Tokens at risk since the last copy on another node or in the store, and on the expert's own node."""
        self._places = {
            expert_unit(path, expert): (row, expert)
            for row, (path, number) in enumerate(self._layers.items())
            for expert in range(number)
        }

    def counts(self) -> NDArray[np.int64]:
        """[L, E] tokens of the step that runs, as the layers have counted them so far."""
        counts_LE = np.zeros_like(self.total_LE)
        totals = TokenCount.totals(layer.count for layer in self._state.layers.values())
        for row, load_E in zip(counts_LE, totals, strict=True):
            row[: len(load_E)] = load_E
        return counts_LE

    @property
    def total_LE(self) -> NDArray[np.int64]:
        """[L, E] tokens of the run so far; part of the state, so that it goes back and forth with it."""
        return self._state.expert_load.tokens[0].numpy()

    @property
    def lost_LE(self) -> NDArray[np.int64]:
        """[L, E] tokens lost so far."""
        return self._state.expert_load.tokens[1].numpy()

    @property
    def boost_until_LE(self) -> NDArray[np.int64]:
        """[L, E] totals at which experts that lost tokens have got as many again; else 0."""
        return self._state.expert_load.tokens[2].numpy()

    @property
    def plt(self) -> float:
        """Portion of lost tokens of the run so far, averaged over layers."""
        seen_L = self.total_LE.sum(1)
        return float(np.mean(self.lost_LE.sum(1) / np.maximum(seen_L, 1))) if len(seen_L) else 0.0

    def add(self, step: int) -> None:
        """Adds the tokens of the step that was taken now, as the layers have counted them; so many steps were taken."""
        self.marks.fold()
        counts_LE = self.counts()
        total_LE, boost_until_LE = self.total_LE, self.boost_until_LE
        total_LE += counts_LE
        boost_until_LE[total_LE >= boost_until_LE] = 0
        self._latest.append((step, total_LE - self.lost_LE))
        for ledger in (self.selection, self.local):
            if ledger is not None:
                ledger.add(counts_LE)

    # ---- copies

    def copied(self, units: Iterable[str], version: int) -> None:
        """Records copies of these units on other nodes or in the store, as they are now, at this version."""
        self._note(SAVED, self.selection, units, version)

    def copied_locally(self, units: Iterable[str], version: int) -> None:
        """Records copies of these units in the memory of their own nodes, likewise."""
        self._note(LOCAL, self.local, units, version)

    def checkpointed(self, version: int) -> None:
        """Records a checkpoint of everything, likewise."""
        self._note(CHECKPOINT, None, self._places, version)

    def _note(self, level: int, ledger: TokenLedger | None, units: Iterable[str], version: int) -> None:
        if not self._notes_copies:
            return
        places = self._at(unit for unit in units if unit in self._places)
        self.marks.note(level, places, version, self.total_LE - self.lost_LE)
        if ledger is not None:
            ledger.copied(_by_layer(places, len(self._layers)))

    def skipped(self, units: Collection[str], version: int) -> None:
        """Records that the copies of units that were begun at this version never came to be."""
        places = self._at(units)
        tokens = self.marks.forget(SAVED, places, version)
        if self.selection is not None:
            tokens_LE = np.zeros_like(self.selection.at_risk)
            tokens_LE[tuple(places)] = tokens
            self.selection.put_back(np.clip(tokens_LE, 0, _not_at_risk(self.selection)))

    def _at(self, units: Iterable[str]) -> Places:
        """[2, n] where the experts are."""
        return np.array([self._places[unit] for unit in units], np.int64).reshape(-1, 2).T

    # ---- recoveries

    def count_lost(self, stale: Mapping[str, int]) -> dict[str, int]:
        """Tokens that experts lose which go back to copies of these versions; at most, where one is not known here.

        Example: an expert got 5, 7 and 3 tokens in steps 0 to 2 and was copied after step 1. Back at that copy, it has
        lost 10 of 15 tokens; back at it again after a step with 4 more, these 4.
        """
        places, versions = self._at(stale), np.array(list(stale.values()), np.int64)
        tokens, is_known = self.marks.tokens_at(places, versions)
        for step, tokens_LE in self._latest:
            counts = ~is_known & (step <= versions % version_of(1, 0))
            tokens = np.where(counts, np.maximum(tokens, tokens_LE[tuple(places)]), tokens)
        lost = np.maximum(0, (self.total_LE - self.lost_LE)[tuple(places)] - tokens)
        return dict(zip(stale, lost.tolist(), strict=True))

    def agree_on_lost(self, group: Group, stale: Mapping[str, int], version: int, before: int | None) -> dict[str, int]:
        """Tokens that each stale expert has lost, as the member counts them that knows most; collective.

        All resume with its ledger: some may have counted in a recovery that failed, and others not, and some have begun
        copies of the version that others have not begun.

        Args:
            group: of all members; those that train come first.
            stale: experts that were taken at older versions.
            version: of the copies from which all resume.
            before: version of this member's state before the recovery; None where that was of no running job.
        """
        mine = None if before is None else [before, self.marks.pending]
        known = [(found, -rank) for rank, found in enumerate(gather_json(group, mine)) if found is not None]
        if not known and not self._state.has_marks:
            return {}
        source = -max(known)[1] if known else 0  # whose state is that of the version, as that of all who train
        told = None
        if group.rank == source:
            tokens = self._state.expert_load.tokens.tolist()
            told = {"lost": self.count_lost(stale), "tokens": tokens, "ledger": self.to_bytes().decode()}
        found = share_json(group, told, source)
        self._state.expert_load.tokens.copy_(torch.tensor(found["tokens"]))  # a replica node has none of its own
        self.load_bytes(found["ledger"].encode())
        processed_LE = self.total_LE - self.lost_LE
        reached = step_of(max(known)[0][0]) if known else None
        if reached != step_of(version):  # what they resume from stays where it was found
            self.marks.note(
                CHECKPOINT, self._at(unit for unit in self._places if unit not in stale), version, processed_LE
            )
        is_new = reached is None or reached > step_of(version)
        self.resume(step_of(version), found["lost"], stale, is_new=is_new)
        if stale:  # what is known of copies is part of the state that gets a new version now
            self.marks.fold()
        return found["lost"]

    def resume(
        self, step: int, lost: Mapping[str, int], stale: Mapping[str, int] = _NOTHING, *, is_new: bool = False
    ) -> None:
        """A recovery: all resume after so many steps, some experts from older copies, with so many tokens lost.

        The same on all members. `stale`: versions of these copies. `is_new`: no member has counted what is at risk, or
        some steps that it has counted are undone.
        """
        self.marks.undo(step)
        if is_new:
            counts_LE, each = (self.total_LE, self.lost_LE), self.marks.each.tolist()
            self.selection = self.selection and _restored(self.selection, *counts_LE, each[SAVED])
            self.local = self.local and _restored(self.local, *counts_LE, each[LOCAL])
        for unit, tokens in lost.items():
            row, expert = self._places[unit]
            self.lost_LE[row, expert] += tokens
            self.boost_until_LE[row, expert] = self.total_LE[row, expert] + tokens
        self._latest.clear()
        self._latest.append((step, self.total_LE - self.lost_LE))
        units = list(self._places if is_new else lost)
        for level, ledger in ((SAVED, self.selection), (LOCAL, self.local)):
            if ledger is not None:
                self._resume(level, ledger, units, stale)
                if lost:
                    self.marks.each[level] = ledger.experts_per_layer

    def _resume(self, level: int, ledger: TokenLedger, units: Sequence[str], stale: Mapping[str, int]) -> None:
        """Counts what experts have lost, and what they have processed since their newest copy of a level.

        Copies after the one that an expert was taken from are those of members that were lost with them.
        """
        behind_LE = np.maximum(self.total_LE - ledger.seen, 0)  # steps that no survivor has counted
        if behind_LE.any():
            ledger.add(behind_LE)
        if not units:
            return
        lost_LE = np.clip(self.lost_LE - ledger.lost, 0, ledger.seen - ledger.lost)
        places, at_risk_LE = self._at(units), np.zeros_like(self.total_LE)
        ledger.lose(_by_layer(places, len(self._layers)), lost_LE)
        versions = np.array([stale.get(unit, NEWEST) for unit in units], np.int64)
        processed = (self.total_LE - self.lost_LE)[tuple(places)]
        at_risk_LE[tuple(places)] = processed - self.marks.newest(level, places, versions)
        ledger.put_back(np.clip(at_risk_LE, 0, _not_at_risk(ledger)))

    def boosted(self) -> dict[str, list[float]]:
        """Factors of the experts' load when replicas are allotted, by layer; only layers in which one is not 1."""
        return {
            path: np.where(row[:number] > 0, BOOST, 1.0).tolist()
            for row, (path, number) in zip(self.boost_until_LE, self._layers.items(), strict=True)
            if row.any()
        }

    def to_bytes(self) -> bytes:
        """JSON of what is not part of the state, for members that join."""
        ledgers = [None if ledger is None else ledger.to_json() for ledger in (self.selection, self.local)]
        return json.dumps(
            {"marks": self.marks.to_fields(with_table=not self._state.has_marks), "ledgers": ledgers}
        ).encode()

    def load_bytes(self, data: bytes) -> None:
        """Takes over what `to_bytes` of another member gave."""
        fields = json.loads(data)
        self.marks.take_fields(fields["marks"], with_table=not self._state.has_marks)
        self.selection, self.local = (text and TokenLedger.from_json(text) for text in fields["ledgers"])


def _by_layer(places: Places, layers: int) -> list[list[int]]:
    """For each layer its experts of these."""
    rows, experts = places[:, np.argsort(places[0], kind="stable")]
    return [row.tolist() for row in np.split(experts, np.searchsorted(rows, range(1, layers)))]


def _restored(
    ledger: TokenLedger, total_LE: NDArray[np.int64], lost_LE: NDArray[np.int64], experts_per_layer: int
) -> TokenLedger:
    """A ledger that goes on from the state."""
    fields = json.loads(ledger.to_json())
    counts = {"seen": total_LE, "lost": lost_LE, "at_risk": 0 * total_LE, "waiting": 0 * total_LE}
    fields |= {name: counts_LE.ravel().tolist() for name, counts_LE in counts.items()}
    each = max(experts_per_layer, ledger.experts_per_layer)
    return TokenLedger.from_json(json.dumps(fields | {"experts_per_layer": each}))


def _not_at_risk(ledger: TokenLedger) -> NDArray[np.int64]:
    """[L, E] tokens that are neither at risk nor lost."""
    return np.maximum(ledger.seen - ledger.at_risk - ledger.lost, 0)


def most_at_risk(at_risk: Mapping[str, ArrayLike], budget_bytes: int, expert_bytes: int) -> set[str]:
    """Units of the experts with the most tokens at risk, as many as have room in a budget (MoEtion, Algorithm 1).

        >>> sorted(most_at_risk({"a": [7, 2, 3], "b": [1, 5]}, budget_bytes=350, expert_bytes=100))  # 12 / 18, 6 / 18
        ['a.0', 'a.2', 'b.1']

    Args:
        at_risk: tokens of each expert since it was last copied, by path of its layer.
        budget_bytes: what may be copied now.
        expert_bytes: what the copy of an expert takes.
    """
    tokens_LE = np.zeros((len(at_risk), max(map(np.size, at_risk.values()), default=0)), np.int64)
    for row, tokens_E in zip(tokens_LE, at_risk.values(), strict=True):
        row[: np.size(tokens_E)] = tokens_E
    chosen = planning.select_experts("budget", tokens_LE, budget_bytes=budget_bytes, expert_bytes=expert_bytes)
    return {expert_unit(path, e) for path, experts in zip(at_risk, chosen, strict=True) for e in experts}


class Risk(NamedTuple):
    """What a failure now would cost that takes experts back to their latest copies."""

    plt: float
    """Portion of the run's tokens, averaged over layers."""
    waiting: int
    """Copies that have passed over the expert with tokens at risk that waits longest."""


class ExpertSelector:
    """MoEtion's and PEC's choices of experts."""

    def __init__(self, state: TrainingState, options: CopyOptions, ledger: LossLedger) -> None:
        self._layers = {path: layer.num_experts for path, layer in state.layers.items()}
        experts = [unit.nbytes for unit in state.catalog.units if unit.layer is not None]
        self._expert_bytes, self._all_bytes = max(experts, default=1), sum(experts)
        self._options, self._ledger, self._load = options, ledger, state.expert_load
        self._ranks_LE = np.full(ledger.total_LE.shape, -1)
        self.copied: Collection[str] | None = None
        """Experts of which there are copies at all; None for all. Others train on enough nodes."""

    def replan(self, active: Mapping[str, Collection[int]], ranks: int) -> None:
        """Ranks train experts otherwise from now on: `active`, by unit."""
        names = [expert_unit(path, expert) for path, number in self._layers.items() for expert in range(number)]
        found = iter(planning.primaries([list(active[name]) for name in names], [1] * len(names), ranks))
        for row, number in zip(self._ranks_LE, self._layers.values(), strict=True):
            row[:number] = [next(found) for _ in range(number)]

    def for_peers(self, kept: Collection[str], measured: int | None = None) -> set[str]:
        """MoEtion: of the units that peers are to keep, those with the most tokens at risk after the step that begins.

        Its own tokens are not known yet: in their place are those that each expert gets in a step on average, and one
        at least. The units are as many as have room in the budget of bytes to peers; a unit that its replica follows
        takes less of it. `measured`: the budget where none is given as an option; None for what it is before there are
        measurements.
        """
        ledger = self._ledger.selection
        if ledger is None:
            return set()
        expected_LE = np.maximum(np.rint(self._load.mean_LE), 1).astype(np.int64)
        at_risk = self._only(kept, ledger.at_risk + expected_LE)
        given = self._options.remote_bytes_per_step
        return self._by_budget(at_risk, measured if given is None else given)

    def for_local_memory(self, measured: int | None = None) -> set[str]:
        """MoEtion: the experts with the most tokens at risk if all processes die but their node lives; likewise."""
        ledger, given = self._ledger.local, self._options.local_bytes_per_step
        return set() if ledger is None else self._by_budget(ledger.at_risk, measured if given is None else given)

    def risk(self) -> Risk | None:
        """What experts would lose that are copied to other nodes or to the place that all share; None without any."""
        ledger = self._ledger.selection
        if ledger is None:
            return None
        at_risk_LE = ledger.at_risk if self.copied is None else self._only(self.copied, ledger.at_risk)
        portions_L = at_risk_LE.sum(1) / np.maximum(ledger.seen.sum(1), 1)
        return Risk(float(portions_L.mean()), int(np.where(at_risk_LE > 0, ledger.waiting, 0).max()))

    def to_save(self) -> set[str]:
        """PEC: the experts that are saved to the place that all share, K of each layer as Dynamic-K has it now."""
        return self._in_turn(self._ledger.selection)

    def to_snapshot(self) -> set[str]:
        """PEC: the experts of which snapshots are made in their own node's memory; their K is larger."""
        return self._in_turn(self._ledger.local)

    def _in_turn(self, ledger: TokenLedger | None) -> set[str]:
        if ledger is None:
            return set()
        each = ledger.experts_per_layer
        if self._options.expert_selection == "sequential":
            chosen = planning.select_experts("sequential", ledger.at_risk, ledger.checkpoint, experts_per_layer=each)
            numbers = self._layers.values()
            return self._names([[e for e in row if e < number] for row, number in zip(chosen, numbers, strict=True)])
        return self._names(
            planning.select_per_rank(
                ledger.at_risk, ledger.checkpoint, ledger.waiting, self._ranks_LE, experts_per_layer=each
            )
        )

    def _by_budget(self, at_risk: np.ndarray, budget: int | None) -> set[str]:
        budget = budgets.remote_bytes_per_step(self._expert_bytes, self._all_bytes) if budget is None else budget
        rows = {path: row[:number] for row, (path, number) in zip(at_risk, self._layers.items(), strict=True)}
        return most_at_risk(rows, budget, self._expert_bytes)

    def _names(self, chosen: list[list[int]]) -> set[str]:
        return {expert_unit(path, e) for path, experts in zip(self._layers, chosen, strict=True) for e in experts}

    def _only(self, kept: Collection[str], at_risk: np.ndarray) -> np.ndarray:
        for row, (path, number) in zip(at_risk, self._layers.items(), strict=True):
            for expert in range(number):
                if expert_unit(path, expert) not in kept:
                    row[expert] = 0
        return at_risk
