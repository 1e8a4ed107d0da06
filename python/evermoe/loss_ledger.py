"""Tokens that experts got since they were last copied, and what a failure has cost in them.

The same on all members, as all count the same tokens.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray

from evermoe.comm.gather import gather_json, share_json
from evermoe.comm.group import Group
from evermoe.moe_load import TokenCount
from evermoe.planning import presets
from evermoe.planning.ledger import TokenLedger
from evermoe.presets import Pec
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

    def __init__(self, state: TrainingState, options: Pec, *, notes_copies: bool = True) -> None:
        self._state, self.marks, self._notes_copies = state, state.expert_load.marks, notes_copies
        self._layers = {path: layer.num_experts for path, layer in state.layers.items()}
        self._latest: deque[tuple[int, NDArray[np.int64]]] = deque(maxlen=LATEST_STEPS)
        """Step and [L, E] processed tokens of the latest steps."""
        most = max(self._layers.values(), default=0)
        each = presets.levels(max(most, 1), options.experts_per_snapshot, options.experts_per_save)
        self.selection, self.local = (
            TokenLedger(
                len(self._layers), most, experts_per_layer=k, max_lost_token_fraction=options.max_lost_token_fraction
            )
            if most
            else None
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

    def copied(self, units: Iterable[str], version: int, behind: Collection[str] = ()) -> None:
        """Records copies of these units on other nodes or in the store, as they are now, at this version.

        Those of `behind` are as they were before the latest step, at the version before.
        """
        self._note(SAVED, self.selection, units, version, behind)

    def copied_locally(self, units: Iterable[str], version: int) -> None:
        """Records copies of these units in the memory of their own nodes, likewise."""
        self._note(LOCAL, self.local, units, version)

    def checkpointed(self, version: int) -> None:
        """Records a checkpoint of everything, likewise."""
        self._note(CHECKPOINT, None, self._places, version)

    def _note(
        self,
        level: int,
        ledger: TokenLedger | None,
        units: Iterable[str],
        version: int,
        behind: Collection[str] = (),
    ) -> None:
        if not self._notes_copies:
            return
        experts = [unit for unit in units if unit in self._places]
        older, newer_LE = self._at(unit for unit in experts if unit in behind), None
        if older.size:
            newer_LE = np.zeros_like(self.total_LE)
            newer_LE[tuple(older)] = self.counts()[tuple(older)]
            self.marks.note(level, older, version - 1, self.total_LE - self.lost_LE - newer_LE)
        current = self._at(unit for unit in experts if unit not in behind)
        self.marks.note(level, current, version, self.total_LE - self.lost_LE)
        if ledger is not None:
            ledger.copied(_by_layer(self._at(experts), len(self._layers)), newer_LE)

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
