"""Keeps the state of a job safe, as the preset of its session says, at the cost of as little time as can be.

    step n   forward, backward ─ reduce ─ [gradients to replicas] ─ VOTE ─ update ─ [snapshot of n + 1 begins]
    kinds    replayed   the gradients of step n are at the replicas before the vote: what is committed is safe at once
             snapshot   version n + 1 is captured and sent during step n + 1, whole before its vote: safe a step later

What is kept, and by whom, is `arrangement`'s; when, the couriers' and their pacer's; how much now, the ledger's.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch

from evermoe import planning
from evermoe.arrangement import Arrangement, Kept, Member, Subject, arrange
from evermoe.choosing import Chooser
from evermoe.config import SessionConfig
from evermoe.copies import Bundle, CopyStore, Round, StoredCopy, bundles
from evermoe.courier import Courier, Errand, Listener, Pacer, Sent
from evermoe.elastic import Group, Membership
from evermoe.errors import CorruptCopy, NotReplayable, PeerLost
from evermoe.ledger import Ledger
from evermoe.pacing import COPIES, Pacing
from evermoe.profile.memory import free_host_bytes
from evermoe.recovery import Lagging
from evermoe.replay import Profile, calibrate
from evermoe.replayed import Exchanged, ReplayedCopies
from evermoe.saving import SavedCopy, Saver, Saving
from evermoe.units import TrainingState
from evermoe.versions import step_of, version_of

logger = logging.getLogger(__name__)

MOST_LOCAL_STEPS = 1000
"""Steps between two snapshots on a unit's own node, at most."""


def _number(value: float) -> torch.Tensor:
    return torch.tensor([float(value)], dtype=torch.float64)


class Safety:
    """What a session does so that nothing is lost.

    Args:
        state: this member's units.
        store: this node's arenas.
        membership: who takes part; replica nodes keep copies alone.
        config: of the session: preset, copies, budgets.
        emit: of the session.
    """

    def __init__(
        self, state: TrainingState, store: CopyStore, membership: Membership, config: SessionConfig, emit: Listener
    ) -> None:
        self.state, self.store, self.config, self._emit = state, store, config, emit
        self._membership = membership
        self.preset = planning.PRESETS[config.preset]
        self.arrangement = Arrangement([], "not arranged yet")
        self.commits_late = False
        """Whether an update counts as committed only when the next one is voted for: its snapshots are whole then."""
        self.ledger = Ledger(state, config.experts_per_copy, config.plt_limit)
        self.chooser = Chooser(state, config, self.ledger)
        self.saver = None
        if config.preset == "pec" and config.checkpoint_dir is not None:
            self.saver = Saver(Path(config.checkpoint_dir), state)
        self.pacer = Pacer()
        self.pacer.attach(membership.group)
        self.couriers = {
            name: Courier(membership.background, pacer, f"evermoe-{name}")
            for name, pacer in (("gradients", None), ("snapshots", self.pacer))
        }
        self.pacing = Pacing(self.pacer, self.couriers["snapshots"], store, membership, config)
        self._profile: Profile | None = None
        self._is_calibrated = False
        self._replayed: ReplayedCopies | None = None
        self._base = (0, 0)
        self._older: tuple[ReplayedCopies, tuple[int, int], int] | None = None
        """The replicas before the latest arrangement, until what that asks for is whole; their base and generation."""
        self._generation, self._member = 0, ""
        self._is_protected = False
        """Whether all copies of the latest arrangement were whole once."""
        self._is_settled = False
        """Whether nothing is sent until `protect`, as the members change."""
        self._round: Round | Saving | None = None
        self._exchange: Errand[Exchanged] | None = None
        self._is_early = False
        """Whether nobody adds to the gradients that this member sends: they may go while others are reduced."""
        self._selected: set[str] | None = None
        self._local: dict[int, tuple[str, ...]] = {}
        """Units of the bundles that only their primaries keep, by the bundle's number."""
        self._sent: dict[int, tuple[tuple[str, ...], int]] = {}
        """Units and period of the bundles that others keep, too."""
        self._local_steps, self._newest_local = 1, 0
        self._step_began = time.monotonic()
        self.step_seconds, self.sent_bytes = 0.0, 0
        """Of the last step: its time, and the bytes of gradients and states sent to replicas."""
        self._asked: set[str] = set()
        self._has_told = False
        """Of the first message that could not be used."""
        self._trained_by: dict[str, tuple[int, ...]] = {}
        """Per unit, the ranks that train it, as of the latest arrangement."""
        self._followed: set[str] = set()
        """Units that replicas follow."""
        self._behind: set[str] = set()
        """Units whose replicas are a step behind, as they get the state alone."""

    @property
    def group(self) -> Group:
        """All members, replica nodes included."""
        return self._membership.everyone

    @property
    def lagging(self) -> Lagging:
        """Whether a recovery may take experts at older versions than the rest."""
        if self.config.preset in ("pec", "moetion"):
            return "always"
        return "if needed" if self.config.preset == "auto" and self.config.copies else "never"

    # ---- who keeps what

    def arrange(self, nodes: Sequence[str], generation: int, member: str) -> None:
        """Decides with all members who keeps what from now on; collective. `protect` must follow."""
        self.settle()
        seconds = self.pacing.step_seconds, self.pacing.network_seconds
        mine = Member(nodes[self.group.rank], free_host_bytes() or 1 << 62, self.config.role == "train", *seconds)
        mine = replace(mine, log_bytes=self.config.replay_log_bytes)
        self._calibrate()
        told = {"member": asdict(mine), "units": self._about_units() if self.group.rank == 0 else None}
        everyone = [json.loads(text) for text in self.group.all_gather_bytes(json.dumps(told).encode())]
        subjects = self._subjects(everyone[0]["units"])
        self.arrangement = arrange(
            self.config.preset,
            subjects,
            [Member(**each["member"]) for each in everyone],
            copies=self.config.copies,
            budget=self.config.copy_budget,
        )
        repeatable = {subject.name for subject in subjects if subject.replayable}
        self._followed = {each.unit for each in self.arrangement.kept if each.kind == "replayed"}
        self._behind = self._followed - repeatable
        self._trained_by = {subject.name: subject.active for subject in subjects}
        is_followed_late = any(kept.kind == "snapshot" and kept.period == 1 for kept in self.arrangement.kept)
        self.commits_late = self.config.copies > 0 and (self.preset.selection == "all" or is_followed_late)
        if self.config.copies:
            self._arrange_arenas(generation, member)
        replayed = [kept for kept in self.arrangement.kept if kept.kind == "replayed"]
        alone = {subject.name for subject in subjects if len(subject.active) == 1}
        self._is_early = all(kept.unit in alone for kept in replayed if kept.primary == self.group.rank)
        if self._replayed is not None:
            if self._is_protected:
                self._drop_older()
                self._older = self._replayed, self._base, self._generation
            else:  # it never was whole: what was before it still is what there is
                self._replayed.close()
        self._is_protected = False
        self._replayed = ReplayedCopies(
            self.state,
            replayed,
            self.group.rank,
            self._profile,
            log_bytes=self.config.replay_log_bytes,
            keeps_previous=self.commits_late,
        )
        self._generation, self._member, self._asked = generation, member, set()
        self._local_steps = self.config.local_every or 1
        if self.group.rank == 0:
            logger.info("%s", self.arrangement.words)
        self._emit("arranged", {"words": self.arrangement.words})

    def _arrange_arenas(self, generation: int, member: str) -> None:
        snapshots = [kept for kept in self.arrangement.kept if kept.kind == "snapshot"]
        others = [kept for kept in self.arrangement.kept if kept.kind != "snapshot"]
        found = []
        for period in sorted({kept.period for kept in snapshots}):
            some = [kept for kept in snapshots if kept.period == period]
            found += bundles([k.unit for k in some], [[k.primary, *k.holders] for k in some])
        kept_at = [(kept.unit, rank) for kept in others for rank in self._local_keepers(kept)]
        local = bundles([unit for unit, _ in kept_at], [[rank] for _, rank in kept_at])
        if self.config.preset == "moetion":  # each expert has a version of its own
            local = [Bundle(bundle.holders, (unit,)) for bundle in local for unit in bundle.units]
        if self.saver is not None:
            local = []
        self._local = {len(found) + place: bundle.units for place, bundle in enumerate(local)}
        by_unit = self.arrangement.by_unit
        self._sent = {number: (bundle.units, by_unit[bundle.units[0]].period) for number, bundle in enumerate(found)}
        self.store.arrange([*found, *local], generation, member, self.group.rank)

    def _local_keepers(self, kept: Kept) -> list[int]:
        """Ranks that keep snapshots of their own of what they train and send no snapshots of.

        Where others follow the state a step late, all must be able to go back by one: also after a loss of nodes.
        """
        if not self.commits_late:
            return [kept.primary]
        nodes = {self._membership.nodes[kept.primary]: kept.primary}
        for rank in self._trained_by[kept.unit]:
            nodes.setdefault(self._membership.nodes[rank], rank)
        return list(nodes.values())[: self.config.copies]

    def _about_units(self) -> list[tuple[float, bool]]:
        """Of each unit, what only those who train know: its tokens in a step, and whether its steps can be repeated."""
        tokens, profile = self.state.expert_tokens(), self._profile
        return [
            (tokens.get(unit.name, 0.0), profile is not None and self.state.is_replayable(unit.name, profile))
            for unit in self.state.units
        ]

    def _active(self) -> dict[str, tuple[int, ...]]:
        """The ranks that train each unit."""
        ranks = tuple(range(self._membership.trainers))
        matrices = {path: layer.matrix_RE for path, layer in self.state.layers.items()}
        return {
            unit.name: ranks
            if unit.layer is None
            else tuple(np.flatnonzero(matrices[unit.layer][:, unit.expert]).tolist())
            for unit in self.state.units
        }

    def _subjects(self, about: Sequence[tuple[float, bool]]) -> list[Subject]:
        active = self._active()
        return [
            Subject(
                unit.name,
                unit.nbytes,
                unit.pieces[0].nbytes if unit.layer is not None else unit.nbytes,
                active[unit.name],
                tokens,
                is_replayable,
            )
            for unit, (tokens, is_replayable) in zip(self.state.units, about, strict=True)
        ]

    def _calibrate(self) -> None:
        """Finds out how the optimizer's steps are repeated; once, and only where a preset repeats any."""
        is_used = "replayed" in self.preset.kinds and self.config.copies and self.group.size > 1
        if is_used and self.config.role == "train" and not self._is_calibrated:
            self._is_calibrated = True
            try:
                self._profile = calibrate(self.state.optimizer)
            except NotReplayable as error:
                if self.group.rank == 0:
                    logger.warning("copies get the state after each step, not gradients: %s", error)

    def protect(self, version: int) -> None:
        """All copies of the arrangement as of `version`; returns when they are whole everywhere. Collective.

        Raises:
            PeerLost: a member was lost meanwhile.
            CorruptCopy: copies did not match their digests three times in a row.
        """
        self.pacer.hurry()
        step = step_of(version)
        self._base = step, version
        for _ in range(3):
            is_whole = self._protect_once(version, step) if self.config.copies else True
            self._emit("confirm", {"step": step})
            if round(float(self.group.all_reduce(_number(is_whole)))) == self.group.size:
                break
        else:
            raise CorruptCopy("copies arrive with other bytes than were sent, three times in a row: check the network")
        self._is_settled = False
        self.pacing.restart(step, self.commits_late)
        self.pacer.begin_step()
        self._newest_local = step
        self._is_protected = True
        if self.config.copies and self.saver is None:
            self.ledger.copied((kept.unit for kept in self.arrangement.kept if kept.holders), step)
            self.ledger.copied_here((unit for units in self._local.values() for unit in units), step)
        self._drop_older()
        if self.config.copies:
            self.store.prune(self._generation)

    def _protect_once(self, version: int, step: int) -> bool:
        replayed = self._replayed
        assert replayed is not None
        if self.saver is not None:
            return self._save_everything(version, self.saver)
        self._round = Round(self.store, version, self.couriers["snapshots"], emit=self._emit)
        courier = self.couriers["gradients"]
        states = courier.go(lambda: replayed.exchange(courier, step, only_states=True))
        if not (self.couriers["snapshots"].wait(self._round.errand, self._membership.group) and states.wait()):
            raise PeerLost(self._round.errand.lost or states.lost or "the group was dropped")
        assert states.result is not None
        self.sent_bytes = states.result.sent_bytes
        return bool(self._round.errand.result) and not states.result.needs_full_state

    def _save_everything(self, version: int, saver: Saver) -> bool:
        """Every unit once: from then on a few at a time are enough."""
        saver.open(self._member, version if step_of(version) else 0)
        self.group.all_reduce(_number(0))  # nobody writes a newer version while another still removes those
        has_all = saver.has_all()
        if round(float(self.group.all_reduce(_number(has_all)))) == self.group.size:
            return True
        every = [unit.name for unit in self.state.units if unit.layer is not None]
        rank, ranks = self.group.rank, self.group.size
        self._round = saver.save(version, every, self._trained_by, rank, ranks, self.couriers["snapshots"])
        self.ledger.copied(every, step_of(version))
        if self._round is not None:
            self._round.errand.wait()
            saver.flush()
        return True

    # ---- a step

    def begin_step(self) -> None:
        """A step begins."""
        self._step_began = time.monotonic()
        self._exchange = None
        self.pacer.begin_forward()

    def begin_exchange(self, step: int) -> None:
        """This member's gradients are there, not reduced: sends those that are whole already, beside the rest."""
        if self._is_early:
            self._start_exchange(step)

    def finish(self, step: int) -> tuple[bool, int]:
        """All gradients are whole: sends those of the step that comes; waits for what must be safe before it.

        Returns:
            Whether that is so, as far as this member knows, and of how many units it needs the full state anew.
        """
        self._emit("send", {"step": step})
        if self.commits_late:
            self.pacer.hurry()
        with self.pacer.busy(COPIES):
            is_whole = self._exchange_gradients(step)
            if self._round is not None and self.commits_late:
                is_whole = self._wait_for_round() and is_whole
            elif self._round is not None and not self._sent:  # nobody is waited for
                self._round.errand.wait()
        self._emit("confirm", {"step": step})
        return is_whole, len(self._asked)

    def _start_exchange(self, step: int) -> None:
        replayed = self._replayed
        assert replayed is not None
        if replayed.has_peers:
            courier, selected = self.couriers["gradients"], self._select()

            def exchange() -> Exchanged:
                exchanged = replayed.exchange(courier, step, selected)
                if exchanged.held:
                    self._emit("held", {"step": step})
                return exchanged

            self._exchange = courier.go(exchange)

    def _exchange_gradients(self, step: int) -> bool:
        if self._exchange is None:
            self._start_exchange(step)
        if self._exchange is None:
            return True
        is_whole = self._exchange.wait()
        if self._exchange.result is not None:
            self.sent_bytes = self._exchange.result.sent_bytes
            self._asked |= self._exchange.result.needs_full_state
            if self._asked and not self._has_told:
                self._has_told = True
                logger.warning(
                    "the copies here of %s wait for its full state, which comes with the next step: %s",
                    min(self._asked),
                    self._exchange.result.problem,
                )
        return is_whole

    def before_update(self) -> None:
        """The optimizer wants to write the state: a snapshot of it is finished first."""
        if self._round is not None:
            self._round.wait_captured()

    def committed(self, version: int, clip: float) -> None:
        """All members have agreed on the step, and it is taken: `version` is the state now."""
        assert self._replayed is not None
        self._replayed.committed(clip)
        self.step_seconds = time.monotonic() - self._step_began
        selected = self._selected or set()
        if selected & self._behind:  # of what cannot be repeated the replica has the state before the step
            self.ledger.copied(selected & self._behind, step_of(version) - 1)
        self.ledger.add(step_of(version))
        if selected - self._behind:
            self.ledger.copied(selected - self._behind, step_of(version))

    def begin_copies(self, version: int) -> None:
        """Begins to copy the state, which is that of `version`, as far as that is due."""
        if self._round is not None and self._is_due(step_of(version)):  # one version at a time
            self.pacer.hurry()
            self._wait_for_round()
        self.pacer.begin_step()
        if self.config.copies:
            self._round = self._next_round(version)

    def _select(self) -> set[str] | None:
        """Units whose replicas follow the step that runs; None for all."""
        if self.config.preset != "moetion":
            return None
        self._selected = self.chooser.for_peers(self._followed, self.ledger.counts())
        return self._selected

    def _next_round(self, version: int) -> Round | Saving | None:
        """Begins to copy the new version, as far as that is due."""
        step, courier = step_of(version), self.couriers["snapshots"]
        if self.saver is not None:
            return self._save(version, self.saver) if step % self.config.save_every == 0 else None
        if self.commits_late:
            return None if self._is_settled else Round(self.store, version, courier, emit=self._emit)
        due = self._due_for_peers(step)
        self.ledger.copied((unit for number in due for unit in self._sent[number][0]), step)
        due |= self._due_at_home(step)
        if not due or self._is_settled:  # where the members change, nobody would receive it
            return self._round
        return Round(self.store, version, courier, due, self._emit)

    def _is_due(self, step: int) -> bool:
        return self.commits_late or bool(self._due_for_peers(step)) or not self._sent

    def _due_for_peers(self, step: int) -> set[int]:
        return {number for number, (_, period) in self._sent.items() if step % period == 0}

    def _wait_for_round(self) -> bool:
        """Whether the version that is under way is whole here. The training thread waits, but not for a silent peer."""
        assert self._round is not None
        errand = self._round.errand
        is_done = self.couriers["snapshots"].wait(errand, self._membership.group)
        return is_done and bool(errand.result)

    def _due_at_home(self, step: int) -> set[int]:
        """Bundles of which their primaries make a snapshot in their own memory now."""
        due: set[int] = set()
        if step >= self._newest_local + self._local_steps:
            due, self._newest_local = set(self._local), step
        if self.config.preset == "moetion":
            due = self._due_here(due)
        self.ledger.copied_here((unit for number in due for unit in self._local[number]), step)
        return due

    def _due_here(self, due: set[int]) -> set[int]:
        """MoEtion: of the experts, those that its local budget chooses; the rest at its own pace."""
        chosen = self.chooser.for_own_memory()
        return {
            number
            for number, units in self._local.items()
            if (units[0] in chosen if self.state.by_name[units[0]].layer is not None else number in due)
        }

    def _save(self, version: int, saver: Saver) -> Saving | None:
        chosen = sorted(self.chooser.to_save())
        self.ledger.copied(chosen, step_of(version))
        rank, ranks = self.group.rank, self.group.size
        return saver.save(version, chosen, self._trained_by, rank, ranks, self.couriers["snapshots"])

    def sent(self) -> list[Sent]:
        """The latest messages of this member's copies, for traces."""
        every = [sent for courier in self.couriers.values() for sent in list(courier.sent)]
        return sorted(every, key=lambda sent: sent.start)

    def measures(self) -> tuple[float, float]:
        """Seconds that a capture took and that a step takes, on this member."""
        return (self._round.capture_seconds if self._round is not None else 0.0), self.step_seconds

    def set_pace(self, capture_seconds: float, step_seconds: float) -> None:
        """From the sums over all members: how often snapshots on the units' own nodes cost no more than the budget."""
        if self.config.local_every is None and step_seconds > 0:
            steps = math.ceil(capture_seconds / (self.config.copy_budget * step_seconds))
            self._local_steps = min(max(steps, 1), MOST_LOCAL_STEPS)

    def heal(self) -> None:
        """Some members have asked for full states, which come with the next step; collective."""
        assert self._replayed is not None
        everyone = self.group.all_gather_bytes(json.dumps(sorted(self._asked)).encode())
        self._asked = set()
        for unit in {unit for text in everyone for unit in json.loads(text)}:
            if self.arrangement.by_unit[unit].primary == self.group.rank:
                self._replayed.sender.request_full_state(unit)

    # ---- after a failure

    def settle(self) -> bool:
        """Waits until nothing is under way, which is at once in a dropped group; whether all that was is whole."""
        self.pacer.hurry()
        self._is_settled, is_whole = True, True
        if self._round is not None:
            self._round.wait_captured()
            is_whole = self._wait_for_round()
        if self._exchange is not None:
            is_whole = self._exchange.wait() and is_whole
        self._round = self._exchange = None
        return is_whole

    def count_losses(self, stale: dict[str, int], step: int, established: bool) -> dict[str, int]:
        """Tokens that each stale expert has lost, as the first member that knows counts them; collective.

        `step`: from which all go on.
        """
        steps = {unit: step_of(version) for unit, version in stale.items()}
        mine = None
        if established:
            mine = {"lost": self.ledger.count_lost(steps), "ledger": self.ledger.to_bytes().decode()}
        if self.lagging == "never" or not self.state.layers:
            return {}
        everyone = [json.loads(text) for text in self.group.all_gather_bytes(json.dumps(mine).encode())]
        known = next((found for found in everyone if found is not None), None)
        if known is None:
            return {}
        if not established:
            self.ledger.load_bytes(known["ledger"].encode())
        self.ledger.go_on(step, steps, known["lost"])
        return known["lost"]

    def stored(self) -> Iterator[tuple[StoredCopy | SavedCopy, str]]:
        """Every whole version of every unit that this member has a copy of, and the copy's kind."""
        for stored in self.store.stored():
            yield stored, "snapshot"
        if self.saver is not None:
            for saved in self.saver.saved():
                yield saved, "persisted"
        for copies, base, generation in self._replicas():
            for unit, step, data, value in copies.stored():
                version = base[1] if step == base[0] else version_of(generation, step)
                yield StoredCopy(unit, version, value, data), "replayed"

    def _replicas(self) -> list[tuple[ReplayedCopies, tuple[int, int], int]]:
        now = [] if self._replayed is None else [(self._replayed, self._base, self._generation)]
        return now + ([] if self._older is None else [self._older])

    def _drop_older(self) -> None:
        if self._older is not None:
            self._older[0].close()
            self._older = None

    def close(self) -> None:
        """Ends all threads. Nothing may be under way, or the group must be dropped."""
        self.settle()
        for courier in self.couriers.values():
            courier.close()
        for copies, _, _ in self._replicas():
            copies.close()
        if self.saver is not None:
            self.saver.close()
        self._replayed = self._older = None
