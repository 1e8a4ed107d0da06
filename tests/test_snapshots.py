"""The rounds of snapshots between two processes: what is due waits for what travels, and nobody waits for ever."""

from pathlib import Path
from types import SimpleNamespace

import torch

from evermoe import MoE, SessionConfig
from evermoe.arrangement import Arrangement, Kept
from evermoe.choosing import Chooser
from evermoe.copies import CopyStore
from evermoe.ledger import Ledger
from evermoe.snapshots import Snapshots
from evermoe.units import TrainingState, expert_unit
from evermoe.versions import step_of, version_of
from ranks import run_ranks
from test_courier import PATIENCE, members

PERIOD = 3


def make(group, folder):
    """Rank 0 has an expert whose snapshots rank 1 keeps, too, and each rank has one whose snapshots stay at home."""
    torch.manual_seed(0)
    layer = MoE(8, 8, 3, top_k=1)
    state = TrainingState(layer, torch.optim.AdamW(layer.parameters(), fused=True))
    path = next(iter(state.layers))
    sent, *home = (expert_unit(path, expert) for expert in range(3))
    state.adopt({path: [0, 1] if group.rank == 0 else [2]}, {})
    found, background = members(group, folder, PATIENCE)
    membership = SimpleNamespace(
        group=found, everyone=found, background=background, nodes=["a", "b"], device=torch.device("cpu")
    )
    config = SessionConfig(local_every=1)
    store, ledger = CopyStore(Path(folder) / str(group.rank), state), Ledger(state)
    snapshots = Snapshots(
        state, store, membership, config, ledger, Chooser(state, config, ledger), lambda name, fields: None
    )
    kept = [Kept(sent, "snapshot", 0, (1,), PERIOD), *(Kept(unit, "active", rank) for rank, unit in enumerate(home))]
    active = {sent: (0,), home[0]: (0,), home[1]: (1,)}
    snapshots.arrange(Arrangement(kept, ""), active, 1, "member", commits_late=False)
    snapshots.begin_everything(version_of(1, 0))
    assert snapshots.wait()
    snapshots.restart(0)
    return snapshots, store, home[group.rank], found


def take_steps(group, folder):
    """Newest step at home, and of what was sent, after the steps in which snapshots travel or not."""
    snapshots, store, home, all_members = make(group, folder)
    snapshots.pacer.expect({("never", 0): (0, 1.0)})  # no window ever opens

    def newest():
        found = {}
        for stored in store.stored():
            kind = "home" if stored.unit == home else "sent"
            found[kind] = max(found.get(kind, 0), step_of(stored.version))
        return found

    seen = {}
    for step in range(1, PERIOD + 2):
        snapshots.begin(version_of(1, step))
        snapshots.wait_captured()  # as the optimizer does: it must not wait for what travels
    seen["under way"] = newest()
    all_members.all_reduce(torch.zeros(1))  # nothing is sent before the other has looked, too
    snapshots.pacer.hurry()
    assert snapshots.wait()
    snapshots.begin(version_of(1, PERIOD + 2))
    assert snapshots.settle()
    seen["over"] = newest()
    snapshots.close()
    return seen


def test_what_stays_at_home_waits_for_what_travels_over_several_steps(tmp_path):
    sender, receiver = run_ranks(tmp_path, 2, take_steps, str(tmp_path))
    assert sender["under way"] == {"home": PERIOD, "sent": PERIOD}
    assert receiver["under way"]["sent"] == 0
    assert sender["over"] == {"home": PERIOD + 2, "sent": PERIOD}
    assert receiver["over"]["sent"] == PERIOD
