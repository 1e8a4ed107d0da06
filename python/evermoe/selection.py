"""Tokens that experts got since they were last copied, what a failure has cost in them, and what is copied next.

The same on all members, as all count the same tokens.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from evermoe import planning
from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.keeper import CopyOptions
from evermoe.moe_load import TokenCount
from evermoe.planning import TokenLedger, presets
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit
from evermoe.state.version import step_of

LATEST_STEPS = 16
"""Steps of which all totals are remembered."""
MOST_MARKS = 32
"""Latest copies of a unit that are remembered."""
BOOST = 1.1
"""What the load of experts that lost tokens counts for, until they have got as many again (MoEtion)."""


class LossLedger:
    """Counts the tokens of all experts in the steps that were taken, in `ExpertLoad.tokens`.

    The portion of lost tokens (PLT, of PEC / MoC-System) is the tokens in the updates that recoveries had to give up,
    over all tokens of the run so far, per layer, averaged over layers.
    """

    def __init__(self, state: TrainingState, experts_per_copy: int | None = None, plt_limit: float = 1.0) -> None:
        self._state = state
        self._layers = {path: layer.num_experts for path, layer in state.layers.items()}
        self._latest: deque[tuple[int, NDArray[np.int64]]] = deque(maxlen=LATEST_STEPS)
        """Step and `total_LE` of the latest steps."""
        self._marks: dict[str, list[tuple[int, int]]] = {}
        """Per expert: step and total tokens of its latest copies."""
        self.selection, self.local = self._new_ledger(experts_per_copy, plt_limit), self._new_ledger(None, 1.0)
        """Tokens at risk since the last copy on another node or in the store, and on the expert's own node."""
        self._places = {
            expert_unit(path, expert): (row, expert)
            for row, (path, number) in enumerate(self._layers.items())
            for expert in range(number)
        }

    def _new_ledger(self, experts_per_copy: int | None, plt_limit: float) -> TokenLedger | None:
        most = max(self._layers.values(), default=0)
        if not most:
            return None
        each = presets.experts_per_copy(most) if experts_per_copy is None else experts_per_copy
        return TokenLedger(len(self._layers), most, experts_per_layer=each, plt_limit=plt_limit)

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
        counts_LE = self.counts()
        total_LE, boost_until_LE = self.total_LE, self.boost_until_LE
        total_LE += counts_LE
        boost_until_LE[total_LE >= boost_until_LE] = 0
        self._latest.append((step, total_LE.copy()))
        for ledger in (self.selection, self.local):
            if ledger is not None:
                ledger.add(counts_LE)

    def copied(self, units: Iterable[str], step: int) -> None:
        """Records copies of these units as they are now, after so many steps."""
        units = [unit for unit in units if unit in self._places]
        self._mark(units, step)
        if self.selection is not None:
            self.selection.copied(self._by_layer(units))

    def skipped(self, unit: str, step: int) -> None:
        """Records that the copy of a unit that was begun after so many steps never came to be."""
        marks = self._marks.get(unit, [])
        place = next((place for place, (at, _) in enumerate(marks) if at == step), None)
        if place is None:
            return
        _, total = marks.pop(place)
        if self.selection is not None and place == len(marks):  # no copy was begun since
            tokens_LE = np.zeros_like(self.selection.at_risk)
            tokens_LE[self._places[unit]] = total - (marks[-1][1] if marks else 0)
            tokens_LE = np.minimum(tokens_LE, self.selection.seen - self.selection.at_risk)
            self.selection.put_back(tokens_LE)

    def copied_locally(self, units: Iterable[str], step: int) -> None:
        """Records copies of these units in the memory of their own nodes."""
        units = [unit for unit in units if unit in self._places]
        self._mark(units, step)
        if self.local is not None:
            self.local.copied(self._by_layer(units))

    def _by_layer(self, units: Iterable[str]) -> list[list[int]]:
        chosen: list[list[int]] = [[] for _ in self._layers]
        for row, expert in (self._places[unit] for unit in units):
            chosen[row].append(expert)
        return chosen

    def _mark(self, units: Iterable[str], step: int) -> None:
        for unit in units:
            row, expert = self._places[unit]
            marks = self._marks.setdefault(unit, [])
            if not marks or marks[-1][0] < step:
                marks.append((step, int(self.total_LE[row, expert])))
                del marks[:-MOST_MARKS]

    def count_lost(self, stale: Mapping[str, int]) -> dict[str, int]:
        """Tokens that experts lose which go back to copies of these steps; at most, where a copy is not known here.

        Example: an expert got 5, 7 and 3 tokens in steps 0 to 2 and was copied after step 1. Back at that copy, it has
        lost 10 of 15 tokens.
        """
        lost = {}
        for unit, step in stale.items():
            before = max((total for at, total in self._marks.get(unit, ()) if at <= step), default=0)
            before = max([before, *(int(total_LE[self._places[unit]]) for at, total_LE in self._latest if at <= step)])
            lost[unit] = int(self.total_LE[self._places[unit]]) - before
        return lost

    def agree_on_lost(self, group: Group, stale: Mapping[str, int], step: int, before: int | None) -> dict[str, int]:
        """Tokens that each stale expert has lost, as the member counts them that knows most; collective.

        All resume with its ledger: some may have counted in a recovery that failed, and others not.

        Args:
            group: of all members.
            stale: experts that were taken at older versions.
            step: from which all resume.
            before: version of this member's state before the recovery; None where that was of no running job.
        """
        steps = {unit: step_of(version) for unit, version in stale.items()}
        mine = None
        if before is not None:
            mine = {"version": before, "lost": self.count_lost(steps), "ledger": self.to_bytes().decode()}
        known = max(filter(None, gather_json(group, mine)), key=lambda found: found["version"], default=None)
        if known is None:
            return {}
        self.load_bytes(known["ledger"].encode())
        self.resume(step, steps, known["lost"])
        return known["lost"]

    def resume(self, step: int, since: Mapping[str, int], lost: Mapping[str, int]) -> None:
        """A recovery: all resume after so many steps, some experts from copies of older ones, with so many tokens lost.

        The same on all members. Who goes back to such a copy a second time loses what came after the first.
        """
        for marks in self._marks.values():
            marks[:] = [mark for mark in marks if mark[0] <= step]
        for unit, tokens in lost.items():
            row, expert = self._places[unit]
            self.lost_LE[row, expert] += tokens
            self.boost_until_LE[row, expert] = self.total_LE[row, expert] + tokens
            self._marks[unit] = [(since[unit], int(self.total_LE[row, expert]))]
        self._latest.clear()
        self._latest.append((step, self.total_LE.copy()))
        for ledger in (self.selection, self.local):
            if ledger is not None and lost:
                ledger.lose(self._by_layer(lost))

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
        return json.dumps({"marks": self._marks, "ledgers": ledgers}).encode()

    def load_bytes(self, data: bytes) -> None:
        """Takes over what `to_bytes` of another member gave."""
        fields = json.loads(data)
        self._marks = {unit: [(step, total) for step, total in marks] for unit, marks in fields["marks"].items()}
        self.selection, self.local = (text and TokenLedger.from_json(text) for text in fields["ledgers"])


class ExpertSelector:
    """MoEtion's and PEC's choices of experts."""

    def __init__(self, state: TrainingState, options: CopyOptions, ledger: LossLedger) -> None:
        self._layers = {path: layer.num_experts for path, layer in state.layers.items()}
        experts = [unit.nbytes for unit in state.catalog.units if unit.layer is not None]
        self._expert_bytes, self._all_bytes = max(experts, default=1), sum(experts)
        self._options, self._ledger = options, ledger

    def for_peers(self, kept: Collection[str], counts_LE: np.ndarray) -> set[str]:
        """MoEtion: of the units that peers are to keep, those with the most tokens at risk, this step's included.

        They are as many as have room in the budget of bytes to peers; a unit that its replica follows takes less of it.
        """
        ledger = self._ledger.selection
        if ledger is None:
            return set()
        at_risk = self._only(kept, ledger.at_risk + counts_LE)
        return self._by_budget(at_risk, self._options.remote_bytes_per_step)

    def for_local_memory(self) -> set[str]:
        """MoEtion: the experts with the most tokens at risk if all processes die but their node lives."""
        ledger = self._ledger.local
        return set() if ledger is None else self._by_budget(ledger.at_risk, self._options.local_bytes_per_step)

    def to_save(self) -> set[str]:
        """PEC, load-aware: K experts of each layer on average, K as Dynamic-K has it now."""
        ledger = self._ledger.selection
        if ledger is None:
            return set()
        return self._names(
            planning.select_experts(
                "load-aware",
                ledger.at_risk,
                ledger.checkpoint,
                waiting=ledger.waiting,
                experts_per_layer=ledger.experts_per_layer,
            )
        )

    def _by_budget(self, at_risk: np.ndarray, budget: int | None) -> set[str]:
        budget = presets.remote_bytes_per_step(self._expert_bytes, self._all_bytes) if budget is None else budget
        chosen = planning.select_experts("budget", at_risk, budget_bytes=budget, expert_bytes=self._expert_bytes)
        return self._names(chosen)

    def _names(self, chosen: list[list[int]]) -> set[str]:
        return {expert_unit(path, e) for path, experts in zip(self._layers, chosen, strict=True) for e in experts}

    def _only(self, kept: Collection[str], at_risk: np.ndarray) -> np.ndarray:
        for row, (path, number) in zip(at_risk, self._layers.items(), strict=True):
            for expert in range(number):
                if expert_unit(path, expert) not in kept:
                    row[expert] = 0
        return at_risk
