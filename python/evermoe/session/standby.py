"""Preparation of a waiting spare: it connects to the members, and reserves the shared memory that it will need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from evermoe.comm.membership import MembershipManager
from evermoe.comm.task import Task, run_in_thread
from evermoe.copies.protection_inputs import expected_arenas
from evermoe.copies.snapshot.spare_room import SpareRoom
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.events import StandsBy
from evermoe.events.base_event import Listener
from evermoe.session.session_config import SessionConfig
from evermoe.state.training_state import TrainingState


class Standby:
    """Prepares a spare in background threads, which shortens the recovery in which it begins to train.

    Args:
        membership: knows the members.
        state: built, not in use yet.
        store: where its arenas will be.
        config: of the session.
        replayable: returns those of some units whose steps can be repeated.
        emit: called once all is ready, and again when members have changed.
    """

    def __init__(
        self,
        membership: MembershipManager,
        state: TrainingState,
        store: SnapshotStore,
        config: SessionConfig,
        replayable: Callable[[Iterable[str]], set[str]],
        emit: Listener,
    ) -> None:
        self._membership, self._state, self._store, self._config = membership, state, store, config
        self._replayable, self._emit = replayable, emit
        self._known: list[tuple[str, bool]] = []
        """Node of each rank that was reserved for, and whether it trains."""
        self._told: set[str] | None = None
        """Members with which the latest event was emitted."""
        self._reserving: Task[None] | None = None

    def go_on(self) -> None:
        """Prepare for the current members; called repeatedly during the wait."""
        if self._membership.options.role != "spare" or self._membership.established:
            return
        members = {
            each: data
            for each, data in self._membership.requests.named.items()
            if data["standing"]["established"] and each != self._membership.id
        }
        if not members:
            return
        is_connected = self._membership.stores.connect_new(members)
        is_reserved = self._reserve(members)
        if is_connected and is_reserved and self._told != members.keys():
            self._told = set(members)
            room = self._store.room
            connected = sorted(self._membership.stores.connected)
            self._emit(StandsBy(connected, 0 if room is None else room.nbytes))

    def _reserve(self, members: Mapping[str, Mapping[str, Any]]) -> bool:
        """Reserve memory unless there is enough, and return whether nothing is under way."""
        if self._reserving is not None:
            if not self._reserving.is_over_within(0):
                return False
            self._reserving.wait()
            self._reserving = None
        ranks = sorted((data["node"], data["role"] == "train") for data in members.values())
        ranks.sort(key=lambda rank: not rank[1])
        if (
            not self._config.copies.replication
            or not any(trains for _, trains in ranks)
            or len(ranks) == len(self._known)
        ):
            return True
        self._known = ranks
        config, state = self._config, self._state
        nodes, trains = [node for node, _ in ranks], [does for _, does in ranks]
        replayable = self._replayable(unit.name for unit in state.catalog.units)
        sizes = expected_arenas(state, config.copies, config.placement, nodes, trains, replayable)
        if self._store.room is None:
            self._store.room = SpareRoom(self._store.directory, self._membership.id)
        room, fetched = self._store.room, sum(nbytes for _, nbytes in state.catalog.sizes())
        self._reserving = Task(lambda: room.reserve_files(sizes, fetched))
        run_in_thread(self._reserving, "evermoe-spare-room", ())
        return False

    def end(self) -> None:
        """Stop reserving, as the spare trains or leaves; keep the reserved memory."""
        task, self._reserving = self._reserving, None
        if task is not None and self._store.room is not None:
            self._store.room.stop_reserving()
            task.wait()
