"""Snapshots of the state: which bundles are due at a step, and the round that copies them beside training.

Peers' copies follow the windows that `pacing` finds; copies in a node's own memory are made as often as the budget
allows. PEC's saves to a folder take the same way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from evermoe.arrangement import Arrangement, Kept
from evermoe.choosing import Chooser
from evermoe.config import SessionConfig
from evermoe.copies import Bundle, CopyStore, Round, bundles
from evermoe.courier import Courier, Listener, Pacer
from evermoe.elastic import Membership
from evermoe.ledger import Ledger
from evermoe.pacing import Pacing
from evermoe.saving import Saver, Saving
from evermoe.units import TrainingState
from evermoe.versions import step_of

MOST_LOCAL_STEPS = 1000
"""Steps between two snapshots on a unit's own node, at most."""


class Snapshots:
    """The rounds of a session.

    Args:
        state: this member's units.
        store: this node's arenas.
        membership: who takes part.
        config: of the session.
        ledger: is told what was copied.
        chooser: of experts, for partial presets.
        emit: of the session.
    """

    def __init__(
        self,
        state: TrainingState,
        store: CopyStore,
        membership: Membership,
        config: SessionConfig,
        ledger: Ledger,
        chooser: Chooser,
        emit: Listener,
    ) -> None:
        self._state, self._store, self._membership, self._config = state, store, membership, config
        self._ledger, self._chooser, self._emit = ledger, chooser, emit
        self.pacer = Pacer()
        self.pacer.attach(membership.group)
        self.courier = Courier(membership.background, self.pacer, "evermoe-snapshots", device=membership.device)
        self.pacing = Pacing(self.pacer, self.courier, store, membership, config)
        self.saver = None
        if config.preset == "pec" and config.checkpoint_dir is not None:
            self.saver = Saver(Path(config.checkpoint_dir), state)
        self.commits_late = False
        """Whether an update counts as committed only when the next one is voted for: its snapshots are whole then."""
        self._active: Mapping[str, Sequence[int]] = {}
        """Ranks that train each unit."""
        self._round: Round | Saving | None = None
        self._is_settled = False
        """Whether nothing is sent until `restart`, as the members change."""
        self._local: dict[int, tuple[str, ...]] = {}
        """Units of the bundles that only their primaries keep, by the bundle's number."""
        self._sent: dict[int, tuple[tuple[str, ...], int]] = {}
        """Units and period of the bundles that others keep, too."""
        self._local_steps, self._newest_local = 1, 0
        self._generation, self._member = 0, ""

    # ---- which bundles there are

    def arrange(
        self,
        arrangement: Arrangement,
        active: Mapping[str, Sequence[int]],
        generation: int,
        member: str,
        commits_late: bool,
    ) -> None:
        """Makes the arenas of an arrangement; `begin_everything` and `restart` must follow.

        Raises:
            OSError: the shared memory is too small.
        """
        self.commits_late, self._active = commits_late, active
        self._generation, self._member = generation, member
        self._local_steps = self._config.local_every or 1
        if not self._config.copies:
            return
        snapshots = [kept for kept in arrangement.kept if kept.kind == "snapshot"]
        found = []
        for period in sorted({kept.period for kept in snapshots}):
            some = [kept for kept in snapshots if kept.period == period]
            found += bundles([k.unit for k in some], [[k.primary, *k.holders] for k in some])
        local = [] if self.saver is not None else self._local_bundles(arrangement)
        self._local = {len(found) + place: bundle.units for place, bundle in enumerate(local)}
        by_unit = arrangement.by_unit
        self._sent = {number: (bundle.units, by_unit[bundle.units[0]].period) for number, bundle in enumerate(found)}
        self._store.arrange([*found, *local], generation, member, self._membership.everyone.rank)

    def _local_bundles(self, arrangement: Arrangement) -> list[Bundle]:
        others = [kept for kept in arrangement.kept if kept.kind != "snapshot"]
        kept_at = [(kept.unit, rank) for kept in others for rank in self._local_keepers(kept)]
        local = bundles([unit for unit, _ in kept_at], [[rank] for _, rank in kept_at])
        if self._config.preset == "moetion":  # each expert has a version of its own
            return [Bundle(bundle.holders, (unit,)) for bundle in local for unit in bundle.units]
        return local

    def _local_keepers(self, kept: Kept) -> list[int]:
        """Ranks that keep snapshots of their own of what they train and send no snapshots of.

        Where others follow the state a step late, all must be able to go back by one: also after a loss of nodes.
        """
        if not self.commits_late:
            return [kept.primary]
        nodes = {self._membership.nodes[kept.primary]: kept.primary}
        for rank in self._active[kept.unit]:
            nodes.setdefault(self._membership.nodes[rank], rank)
        return list(nodes.values())[: self._config.copies]

    # ---- everything once

    def begin_everything(self, version: int) -> None:
        """Begins to copy all bundles as of `version`."""
        self._round = Round(self._store, version, self.courier, emit=self._emit)

    def save_everything(self, version: int) -> None:
        """PEC: every unit once, from then on a few at a time are enough; collective."""
        group, saver = self._membership.everyone, self.saver
        assert saver is not None
        is_running = bool(group.all_reduce(torch.tensor([int(self._membership.established)])))
        # What an earlier start has saved before its first step is not of this one.
        saver.open(self._member, version if is_running or step_of(version) else 0)
        group.all_reduce(torch.zeros(1))  # nobody writes a newer version while another still removes those
        if group.all_reduce(torch.tensor([int(saver.has_all())])) == group.size:
            return
        every = [unit.name for unit in self._state.units if unit.layer is not None]
        self._round = self._save(version, every)
        if self._round is not None:
            self._round.errand.wait()
            saver.flush()

    def restart(self, step: int) -> None:
        """All copies are whole; the next step begins."""
        self._is_settled, self._newest_local = False, step
        self.pacing.restart(step, self.commits_late)
        self.pacer.begin_step()
        if self._config.copies:
            self._ledger.copied_here((unit for units in self._local.values() for unit in units), step)
            self._store.prune(self._generation)

    # ---- a step

    def begin(self, version: int) -> None:
        """Begins to copy the state, which is that of `version`, as far as that is due."""
        if self._round is not None and self._is_due(step_of(version)):  # one version at a time
            self.pacer.hurry()
            self.wait()
        self.pacer.begin_step()
        if self._config.copies:
            self._round = self._next_round(version)

    def finish(self) -> bool:
        """Before a vote: waits for what must be safe by then; whether that is so."""
        if self._round is not None and self.commits_late:
            return self.wait()
        if self._round is not None and not self._sent:  # nobody is waited for
            self._round.errand.wait()
        return True

    def wait(self) -> bool:
        """Whether the version that is under way is whole here. The training thread waits, but not for a silent peer."""
        if self._round is None:
            return True
        errand = self._round.errand
        is_done = self.courier.wait(errand, self._membership.group)
        return is_done and bool(errand.result)

    @property
    def lost(self) -> str | None:
        """Why the version that is under way will not be whole: a peer is gone."""
        return None if self._round is None else self._round.errand.lost

    def wait_captured(self) -> None:
        """Until the state may be changed."""
        if self._round is not None:
            self._round.wait_captured()

    def settle(self) -> bool:
        """Waits until nothing is under way, and begins nothing more; whether all that was is whole."""
        self.pacer.hurry()
        self._is_settled = True
        self.wait_captured()
        is_whole = self.wait()
        self._round = None
        return is_whole

    @property
    def capture_seconds(self) -> float:
        """That the latest capture took."""
        return 0.0 if self._round is None else self._round.capture_seconds

    def set_pace(self, capture_seconds: float, step_seconds: float) -> None:
        """From the sums over all members: how often snapshots on the units' own nodes cost no more than the budget."""
        if self._config.local_every is None and step_seconds > 0:
            steps = math.ceil(capture_seconds / (self._config.copy_budget * step_seconds))
            self._local_steps = min(max(steps, 1), MOST_LOCAL_STEPS)

    # ---- what is due

    def _next_round(self, version: int) -> Round | Saving | None:
        step = step_of(version)
        if self.saver is not None:
            return self._save(version, sorted(self._chooser.to_save())) if step % self._config.save_every == 0 else None
        if self.commits_late:
            return None if self._is_settled else Round(self._store, version, self.courier, emit=self._emit)
        due = self._due_for_peers(step)
        if not due and self._round is not None and not self._round.errand.is_over_within(0):
            return self._round  # which takes several steps; what stays at home can wait for it
        self._ledger.copied((unit for number in due for unit in self._sent[number][0]), step)
        due |= self._due_at_home(step)
        if not due or self._is_settled:  # where the members change, nobody would receive it
            return self._round
        return Round(self._store, version, self.courier, due, self._emit)

    def _is_due(self, step: int) -> bool:
        return self.commits_late or bool(self._due_for_peers(step)) or not self._sent

    def _due_for_peers(self, step: int) -> set[int]:
        return {number for number, (_, period) in self._sent.items() if step % period == 0}

    def _due_at_home(self, step: int) -> set[int]:
        """Bundles of which their primaries make a snapshot in their own memory now."""
        due: set[int] = set()
        if step >= self._newest_local + self._local_steps:
            due, self._newest_local = set(self._local), step
        if self._config.preset == "moetion":
            due = self._due_by_budget(due)
        self._ledger.copied_here((unit for number in due for unit in self._local[number]), step)
        return due

    def _due_by_budget(self, due: set[int]) -> set[int]:
        """MoEtion: of the experts, those that its local budget chooses; the rest at its own pace."""
        chosen = self._chooser.for_own_memory()
        return {
            number
            for number, units in self._local.items()
            if (units[0] in chosen if self._state.by_name[units[0]].layer is not None else number in due)
        }

    def _save(self, version: int, experts: Sequence[str]) -> Saving | None:
        assert self.saver is not None
        self._ledger.copied(experts, step_of(version))
        group = self._membership.everyone
        return self.saver.save(version, experts, self._active, group.rank, group.size, self.courier)

    def close(self) -> None:
        """Ends all threads. Nothing may be under way."""
        self.courier.close()
        if self.saver is not None:
            self.saver.close()
