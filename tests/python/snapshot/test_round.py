"""A round of several bundles between two processes: each becomes visible by itself."""

from pathlib import Path

import torch

from evermoe import MoE
from evermoe.comm.courier import Courier
from evermoe.copies.snapshot.bundles import Bundle
from evermoe.copies.snapshot.round import SnapshotRound
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.events import ChunkSent, SnapshotReceived
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit
from evermoe.state.version import version_of
from support.harness import PATIENCE, wait_until
from support.ranks import connected, run_threads

VERSION = version_of(1, 3)


def exchange(group, folder):
    """Return what this rank has seen: parts that it sent, bundles that became visible, and its copies of the other's.

    Rank 0 sends its second bundle once rank 1 has the first. Rank 1 has two, too, and sends its own meanwhile.
    """
    layer = MoE(8, 8, 4, top_k=1)
    state = TrainingState(layer, torch.optim.AdamW(layer.parameters(), fused=True))
    path = next(iter(state.layers))
    units = [expert_unit(path, expert) for expert in range(4)]
    mine = units[2 * group.rank : 2 * group.rank + 2]
    state.adopt({path: [2 * group.rank, 2 * group.rank + 1]}, {})
    store = SnapshotStore(Path(folder) / str(group.rank), state, chunk_bytes=1 << 30)
    planned = [Bundle((rank, 1 - rank), (units[2 * rank + number],)) for number in range(2) for rank in range(2)]
    store.create_arenas(planned, 1, "m", group.rank)
    transport = connected(group, PATIENCE)
    courier = Courier(transport, None, "evermoe-snapshots")
    arriving, seen = [], []
    receive = transport.receive

    def noted(*arguments):
        arriving.append(receive(*arguments))
        return arriving[-1]

    transport.receive = noted

    def emit(event):
        if isinstance(event, SnapshotReceived):
            theirs = sorted(found.unit for found in store.stored() if found.unit not in mine)
            seen.append(("published", theirs))
            if group.rank == 1 and len(theirs) == 1:
                group.all_reduce(torch.zeros(1))
        if isinstance(event, ChunkSent):
            seen.append(("sent", event.sent == event.total))
            if group.rank == 1 and len([name for name, _ in seen if name == "sent"]) == 1:
                wait_until(lambda: all(each.has_ended for each in arriving[:2]), "the first bundle is visible")
            if group.rank == 0 and len([name for name, _ in seen if name == "sent"]) == 2:
                group.all_reduce(torch.zeros(1))  # what is under way is the digests of the bundle that is through

    courier.in_flight = 1
    task = SnapshotRound(store, VERSION, courier, emit=emit).start().task
    assert task.wait(), task.lost
    assert task.result
    group.all_reduce(torch.zeros(1))  # nobody closes its connections while the other one still reads
    courier.close()
    store.engine.shutdown()
    return seen


def test_each_bundle_is_visible_as_soon_as_it_is_complete_also_while_others_are_sent(tmp_path):
    _, seen = run_threads(tmp_path, 2, exchange, str(tmp_path))
    (_, first), (_, both) = [each for each in seen if each[0] == "published"]
    assert len(first) == 1
    assert set(first) < set(both)
    assert seen.index(("published", first)) < seen.index(("sent", True)), "before this one has sent its own"
