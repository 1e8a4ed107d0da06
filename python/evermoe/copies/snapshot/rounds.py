"""Rounds of a member: one version at a time is on its way to its holders."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from evermoe.comm.courier import Courier
from evermoe.comm.membership import MembershipManager
from evermoe.copies.snapshot.bundles import Bundle
from evermoe.copies.snapshot.gpu_sources import GpuSources
from evermoe.copies.snapshot.member_speeds import MemberSpeeds
from evermoe.copies.snapshot.page_locks import PageLocks
from evermoe.copies.snapshot.round import STATES, Contents, SnapshotRound
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.events.base_event import Listener
from evermoe.presets import SnapshotMemory
from evermoe.profile.memory import share_of_host_bytes
from evermoe.state.stored import NO_COPIES, KeptCopies


class Rounds:
    """Makes the arenas of a plan, and copies versions to them in the background.

    Args:
        store: this node's arenas.
        membership: the members that take part.
        courier: sends and receives.
        speeds: of this member; learns that of captures.
        memory: where snapshots of a GPU's state are made; see `evermoe.presets`.
        emit: of the session.
    """

    def __init__(
        self,
        store: SnapshotStore,
        membership: MembershipManager,
        courier: Courier,
        speeds: MemberSpeeds,
        memory: SnapshotMemory,
        emit: Listener,
    ) -> None:
        self._store, self._membership, self._courier = store, membership, courier
        self._speeds, self._emit = speeds, emit
        self.sources = store.sources = GpuSources(memory)
        """Used by captures from a GPU."""
        self._page_locks = PageLocks()
        self.current: SnapshotRound | None = None
        """The latest version, under way or over; None before the first one."""
        self.problem = ""
        """Why it is not complete though no member is lost: this host has too little memory."""
        self.locked_bytes = 0
        """Bytes of this member's arenas that are page-locked, so that its GPU writes to them directly."""

    def replace_arenas(
        self, planned: Sequence[Bundle], generation: int, copies: KeptCopies, *, in_background: bool
    ) -> list[Bundle]:
        """Create the arenas of a plan next to the previous ones; see `SnapshotStore.replace_arenas`. Collective.

        Args:
            planned: all bundles.
            generation: of the members.
            copies: the previous ones.
            in_background: whether training does not wait for their memory.
        """
        self.problem = ""
        is_on_gpu = any(device.type == "cuda" for device in self._store.state.devices())  # its driver page-locks them
        kept = self._store.replace_arenas(
            planned, generation, self._membership, copies, reserves=is_on_gpu or not in_background
        )
        share = share_of_host_bytes(self._membership.nodes, self._membership.everyone.rank)
        self.locked_bytes = self._page_locks.lock(self._store, share)
        return kept

    def begin(
        self,
        version: int,
        bundles: Collection[int] | None,
        copies: KeptCopies = NO_COPIES,
        stays: Collection[int] = (),
        contents: Contents = STATES,
    ) -> None:
        """Begin to copy the state, which is that of `version`. The arguments are those of `SnapshotRound`."""
        if self.current is not None:
            self._speeds.host = self.current.captures.host_speed or self._speeds.host
        self.current = SnapshotRound(
            self._store, version, self._courier, bundles, self._emit, copies, stays, contents
        ).start()

    def wait_complete(self) -> bool:
        """Wait for the version under way, but not for a silent peer; return whether it is complete on this member."""
        if self.current is None:
            return True
        task, group = self.current.task, self._membership.trainer_group
        is_done = self._courier.wait_for_task(task, group)
        self.problem = self.current.problem
        if self.problem:
            group.drop(f"no memory for copies: {self.problem}")  # the others wait for messages that are not sent
        return is_done and bool(task.result)

    @property
    def lost(self) -> str | None:
        """Why the version under way will not be complete: a peer is lost."""
        return None if self.current is None else self.current.task.lost

    def wait_captured(self) -> None:
        """Wait until the state may change."""
        if self.current is not None:
            self.current.captures.wait_captured()

    @property
    def capture_seconds(self) -> float:
        """Seconds that the latest capture took."""
        return 0.0 if self.current is None else self.current.captures.seconds
