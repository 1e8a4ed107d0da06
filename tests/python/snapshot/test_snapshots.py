"""Rounds of snapshots between two processes: a scheduled one waits for the one that travels, and neither for ever."""

from pathlib import Path
from types import SimpleNamespace

import torch

from evermoe import MoE
from evermoe.config.copies import CopyConfig
from evermoe.copies.snapshot.snapshots import Snapshots
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.planning.protection import ProtectionPlan, UnitProtection
from evermoe.presets import Auto
from evermoe.state.keeper import Assignment
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit
from evermoe.state.version import step_of, version_of
from support.ranks import members, run_threads

PERIOD = 3
PATIENCE = 20.0


def make(group, folder, snapshot_interval=1):
    """Rank 0 has an expert whose snapshots rank 1 keeps, too, and each rank has one whose snapshots stay at home."""
    torch.manual_seed(0)
    layer = MoE(8, 8, 3, top_k=1)
    state = TrainingState(layer, torch.optim.AdamW(layer.parameters(), fused=True))
    path = next(iter(state.layers))
    sent, *home = (expert_unit(path, expert) for expert in range(3))
    state.adopt({path: [0, 1] if group.rank == 0 else [2]}, {})
    found, transport = members(group, folder, PATIENCE)
    membership = SimpleNamespace(
        id="ab"[group.rank],
        trainer_group=found,
        everyone=found,
        transport=transport,
        nodes=["a", "b"],
        domains=["", ""],
        num_trainers=2,
        role="train",
        device=torch.device("cpu"),
        established=False,
    )
    store = SnapshotStore(Path(folder) / str(group.rank), state)
    options = CopyConfig(preset=Auto(snapshot_interval=snapshot_interval))
    snapshots = Snapshots(state, store, membership, options, lambda event: None)
    kept = [
        UnitProtection(sent, "snapshot", 0, (1,), PERIOD),
        *(UnitProtection(unit, "active", rank, own=(rank,)) for rank, unit in enumerate(home)),
    ]
    active = {sent: (0,), home[0]: (0,), home[1]: (1,)}
    snapshots.replan(Assignment(ProtectionPlan(kept, ""), active, 1, "member", copies_late=False))
    snapshots.protect_all(version_of(1, 0))
    assert snapshots.wait_for_copies()
    snapshots.restart(0)
    return snapshots, store, home[group.rank], found


def copy_what_is_due(snapshots, step):
    snapshots.make_room(step)
    snapshots.pacer.begin_step()
    scheduled = snapshots.scheduled_copies(step, None)
    assert snapshots.scheduled_copies(step, None) == scheduled, "it changes nothing"
    snapshots.begin_copies(version_of(1, step), scheduled)


def take_steps(group, folder):
    """Newest step at home, and of what was sent, after the steps in which snapshots travel or not."""
    snapshots, store, home, all_members = make(group, folder)
    snapshots.pacer.expect_windows({("never", 0): (0, 1.0)})  # no window ever opens

    def newest():
        found = {}
        for stored in store.stored():
            kind = "home" if stored.unit == home else "sent"
            found[kind] = max(found.get(kind, 0), step_of(stored.version))
        return found

    seen = {}
    for step in range(1, PERIOD + 2):
        copy_what_is_due(snapshots, step)
        snapshots.before_update()  # as the optimizer does: it must not wait for what travels
    seen["under way"] = newest()
    all_members.all_reduce(torch.zeros(1))  # nothing is sent before the other has looked, too
    snapshots.pacer.hurry()
    assert snapshots.wait_for_copies()
    copy_what_is_due(snapshots, PERIOD + 2)
    assert snapshots.settle()
    seen["over"] = newest()
    snapshots.close()
    return seen


def test_what_stays_at_home_waits_for_what_travels_over_several_steps(tmp_path):
    sender, receiver = run_threads(tmp_path, 2, take_steps, str(tmp_path))
    assert sender["under way"] == {"home": PERIOD, "sent": PERIOD}
    assert receiver["under way"]["sent"] == 0
    assert sender["over"] == {"home": PERIOD + 2, "sent": PERIOD}
    assert receiver["over"]["sent"] == PERIOD


def first_steps_at_home(group, folder):
    """The first steps of which there are snapshots at home, where capturing takes 2 % of a step: on the host, a GPU."""
    snapshots, *_ = make(group, folder, snapshot_interval=None)
    found = []
    for device in ("cpu", "cuda"):
        snapshots._membership.device = torch.device(device)
        snapshots.set_pace(0.04, 2.0)
        found.append(next(step for step in range(1, 99) if snapshots.scheduled_copies(step, None).local))
    return found


def test_snapshots_at_home_take_what_they_may_of_a_step(tmp_path):
    """Of a budget of 1 % a tenth where the model is on the host: 2 % each 20 steps; on a GPU all of it."""
    assert run_threads(tmp_path, 2, first_steps_at_home, str(tmp_path)) == [[20, 2], [20, 2]]
