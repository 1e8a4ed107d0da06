"""Keeps the state of a job safe, as the preset of its session says, at the cost of as little time as can be.

    step n   forward, backward ─ reduce ─ [gradients to replicas] ─ VOTE ─ update ─ [snapshot of n + 1 begins]
    kinds    replayed   the gradients of step n are at the replicas before the vote: what is committed is safe at once
             snapshot   version n + 1 is captured and sent during step n + 1, whole before its vote: safe a step later

What is kept, and by whom, is `arrangement`'s; the gradients are `following`'s, the snapshots `snapshots`'s; how much is
copied now, the ledger's.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import torch

from evermoe import planning
from evermoe.arrangement import Arrangement, Member, Subject, arrange
from evermoe.choosing import Chooser
from evermoe.config import SessionConfig
from evermoe.copies import MOST_TRIES, CopyStore
from evermoe.courier import Courier, Listener, Sent
from evermoe.elastic import Membership
from evermoe.errors import CorruptCopy, PeerLost
from evermoe.following import Following
from evermoe.group import Group
from evermoe.ledger import Ledger
from evermoe.pacing import COPIES, Pacing
from evermoe.profile.memory import free_host_bytes
from evermoe.recovery import AnyCopy, Lagging
from evermoe.snapshots import Snapshots
from evermoe.units import TrainingState
from evermoe.versions import step_of

logger = logging.getLogger(__name__)


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
        self.state, self.config, self._emit = state, config, emit
        self._store, self._membership = store, membership
        self.preset = planning.PRESETS[config.preset]
        self.arrangement = Arrangement([], "not arranged yet")
        self.active: dict[str, tuple[int, ...]] = {}
        """Per unit, the ranks that train it, as of the latest arrangement."""
        self.ledger = Ledger(state, config.experts_per_copy, config.plt_limit)
        self._chooser = Chooser(state, config, self.ledger)
        self.following = Following(state, membership, config, emit)
        self.snapshots = Snapshots(state, store, membership, config, self.ledger, self._chooser, emit)
        self._selected: set[str] | None = None
        """Units whose replicas follow the step that runs; None for all."""
        self._followed: set[str] = set()
        """Units that replicas follow."""
        self._behind: set[str] = set()
        """Units whose replicas are a step behind, as they get the state alone."""
        self._step_began = time.monotonic()
        self.step_seconds = 0.0
        """Time of the last step."""

    @property
    def group(self) -> Group:
        """All members, replica nodes included."""
        return self._membership.everyone

    @property
    def pacing(self) -> Pacing:
        """When snapshots travel."""
        return self.snapshots.pacing

    @property
    def commits_late(self) -> bool:
        """Whether an update counts as committed only when the next one is voted for: its snapshots are whole then."""
        return self.snapshots.commits_late

    @property
    def couriers(self) -> tuple[Courier, Courier]:
        """The threads that send."""
        return self.following.courier, self.snapshots.courier

    @property
    def lagging(self) -> Lagging:
        """Whether a recovery may take experts at older versions than the rest."""
        if self.config.preset in ("pec", "moetion"):
            return "always"
        return "if needed" if self.config.preset == "auto" and self.config.copies else "never"

    # ---- who keeps what

    def arrange(self, generation: int, member: str) -> None:
        """Decides with all members who keeps what from now on; collective. `protect` must follow.

        Args:
            generation: of the members.
            member: this one's name.
        """
        self.settle()
        if "replayed" in self.preset.kinds and self.config.copies and self.group.size > 1:
            self.following.calibrate()
        told = {"member": asdict(self._about_itself()), "units": self._about_units() if self.group.rank == 0 else None}
        everyone = [json.loads(text) for text in self.group.all_gather_bytes(json.dumps(told).encode())]
        self.active = self.state.active(self._membership.trainers)
        subjects = self._subjects(everyone[0]["units"])
        self.arrangement = arrange(
            self.config.preset,
            subjects,
            [Member(**each["member"]) for each in everyone],
            copies=self.config.copies,
            budget=self.config.copy_budget,
        )
        kept = self.arrangement.kept
        replayed = [each for each in kept if each.kind == "replayed"]
        self._followed = {each.unit for each in replayed}
        self._behind = self._followed - {subject.name for subject in subjects if subject.replayable}
        is_followed_late = any(each.kind == "snapshot" and each.period == 1 for each in kept)
        is_late = self.config.copies > 0 and (self.preset.selection == "all" or is_followed_late)
        self.snapshots.arrange(self.arrangement, self.active, generation, member, is_late)
        self.following.arrange(replayed, self.active, generation, keeps_previous=is_late)
        if self.group.rank == 0:
            logger.info("%s", self.arrangement.words)
        self._emit("arranged", {"words": self.arrangement.words})

    def _about_itself(self) -> Member:
        return Member(
            self._membership.nodes[self.group.rank],
            free_host_bytes() or 1 << 62,
            self.config.role == "train",
            self.pacing.step_seconds,
            self.pacing.network_seconds,
            self.config.replay_log_bytes,
        )

    def _about_units(self) -> list[tuple[float, bool]]:
        """Of each unit, what only those who train know: its tokens in a step, and whether its steps can be repeated."""
        tokens = self.state.expert_tokens()
        return [(tokens.get(unit.name, 0.0), self.following.is_replayable(unit.name)) for unit in self.state.units]

    def _subjects(self, about: Sequence[tuple[float, bool]]) -> list[Subject]:
        return [
            Subject(
                unit.name,
                unit.nbytes,
                unit.pieces[0].nbytes if unit.layer is not None else unit.nbytes,
                self.active[unit.name],
                tokens,
                is_replayable,
            )
            for unit, (tokens, is_replayable) in zip(self.state.units, about, strict=True)
        ]

    def protect(self, version: int) -> None:
        """All copies of the arrangement as of `version`; returns when they are whole everywhere. Collective.

        Raises:
            PeerLost: a member was lost meanwhile.
            CorruptCopy: copies did not match their digests several times in a row.
        """
        self.snapshots.pacer.hurry()
        for _ in range(MOST_TRIES):
            is_whole = self._protect_once(version) if self.config.copies else True
            self._emit("confirm", {"step": step_of(version)})
            if self.group.all_reduce(torch.tensor([int(is_whole)])) == self.group.size:
                break
        else:
            raise CorruptCopy(
                f"copies arrive with other bytes than were sent, {MOST_TRIES} times in a row: check the network"
            )
        if self.config.copies and self.snapshots.saver is None:
            self.ledger.copied((kept.unit for kept in self.arrangement.kept if kept.holders), step_of(version))
        self.snapshots.restart(step_of(version))
        self.following.mark_whole()

    def _protect_once(self, version: int) -> bool:
        if self.snapshots.saver is not None:
            self.snapshots.save_everything(version)
            return True
        self.snapshots.begin_everything(version)
        self.following.begin_states(version)
        is_whole = all([self.snapshots.wait(), self.following.wait()])
        lost = self.snapshots.lost or self.following.lost
        if lost:
            raise PeerLost(lost)
        needed, self.following.asked = self.following.asked, set()
        return is_whole and not needed

    # ---- a step

    def begin_step(self) -> None:
        """A step begins."""
        self._step_began = time.monotonic()
        self.following.begin_step()
        self.snapshots.pacer.begin_forward()

    def begin_exchange(self, step: int) -> None:
        """This member's gradients are there, not reduced: sends those that are whole already, beside the rest."""
        if self.following.is_early:
            self.following.begin(step, self._select())

    def finish(self, step: int) -> tuple[bool, int]:
        """All gradients are whole: sends those of the step that comes; waits for what must be safe before it.

        Returns:
            Whether that is so, as far as this member knows, and of how many units it needs the full state anew.
        """
        self._emit("send", {"step": step})
        if self.commits_late:
            self.snapshots.pacer.hurry()
        with self.snapshots.pacer.busy(COPIES):
            if not self.following.has_begun:
                self.following.begin(step, self._select())
            is_whole = all([self.following.wait(), self.snapshots.finish()])
        self._emit("confirm", {"step": step})
        return is_whole, len(self.following.asked)

    def _select(self) -> set[str] | None:
        if self.config.preset == "moetion":
            self._selected = self._chooser.for_peers(self._followed, self.ledger.counts())
        return self._selected

    def before_update(self) -> None:
        """The optimizer wants to write the state: a snapshot of it is finished first."""
        self.snapshots.wait_captured()

    def committed(self, version: int, clip: float) -> None:
        """All members have agreed on the step, and it is taken: `version` is the state now."""
        self.following.committed(clip)
        self.step_seconds = time.monotonic() - self._step_began
        selected = self._selected or set()
        if selected & self._behind:  # of what cannot be repeated the replica has the state before the step
            self.ledger.copied(selected & self._behind, step_of(version) - 1)
        self.ledger.add(step_of(version))
        if selected - self._behind:
            self.ledger.copied(selected - self._behind, step_of(version))

    def begin_copies(self, version: int) -> None:
        """Begins to copy the state, which is that of `version`, as far as that is due."""
        self.snapshots.begin(version)

    def heal(self) -> None:
        """Some members have asked for full states, which come with the next step; collective."""
        self.following.heal(lambda unit: self.arrangement.by_unit[unit].primary)

    def measures(self) -> tuple[float, float]:
        """Seconds that a capture took and that a step takes, on this member."""
        return self.snapshots.capture_seconds, self.step_seconds

    def sent(self) -> list[Sent]:
        """The latest messages of this member's copies, for traces."""
        every = [sent for courier in self.couriers for sent in list(courier.sent)]
        return sorted(every, key=lambda sent: sent.start)

    # ---- after a failure

    def settle(self) -> bool:
        """Waits until nothing is under way, which is at once in a dropped group; whether all that was is whole."""
        return all([self.snapshots.settle(), self.following.settle()])

    def count_losses(self, stale: dict[str, int], step: int, before: int | None) -> dict[str, int]:
        """Tokens that each stale expert has lost, as the member counts them that knows most; collective.

        All go on with its ledger: some may have counted in a recovery that failed, and others not.

        Args:
            stale: experts that were taken at older versions.
            step: from which all go on.
            before: version of this member's state before the recovery; None where that was of no running job.
        """
        if self.lagging == "never" or not self.state.layers:
            return {}
        steps = {unit: step_of(version) for unit, version in stale.items()}
        mine = None
        if before is not None:
            lost, ledger = self.ledger.count_lost(steps), self.ledger.to_bytes().decode()
            mine = {"version": before, "lost": lost, "ledger": ledger}
        everyone = [json.loads(text) for text in self.group.all_gather_bytes(json.dumps(mine).encode())]
        known = max(filter(None, everyone), key=lambda found: found["version"], default=None)
        if known is None:
            return {}
        self.ledger.load_bytes(known["ledger"].encode())
        self.ledger.go_on(step, steps, known["lost"])
        return known["lost"]

    def stored(self) -> Iterator[tuple[AnyCopy, str]]:
        """Every whole version of every unit that this member has a copy of, and the copy's kind."""
        for stored in self._store.stored():
            yield stored, "snapshot"
        if self.snapshots.saver is not None:
            for saved in self.snapshots.saver.saved():
                yield saved, "persisted"
        for followed in self.following.stored():
            yield followed, "replayed"

    def close(self) -> None:
        """Ends all threads. Nothing may be under way, or the group must be dropped."""
        self.settle()
        self.following.close()
        self.snapshots.close()
