"""Ways back of a rank with sparse versions: dense versions, and windows of which all was copied."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from evermoe.copies.snapshot.bundles import Bundle
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.copies.snapshot.unit_tensors import UnitTensors
from evermoe.pipeline.localised import LocalisedRecovery
from evermoe.pipeline.slice_choice import SliceChoice
from evermoe.pipeline.sparse_windows import SparseWindows
from evermoe.pipeline.stages import StageRank, StageState
from evermoe.state.version import version_of
from support.ranks import alone

BEGUN = version_of(1, 4)
SLICES = 2


def make(folder):
    """A stage on its only rank, its arenas, and its windows."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    state = StageState(module, optimizer, 0, 1, slices=SLICES)
    store = SnapshotStore(Path(folder) / "arenas", state)
    localised = LocalisedRecovery(state, 0, is_on=True, is_spread=False)
    windows = SparseWindows(state, store, localised, SliceChoice(SLICES, store))
    windows.learn([StageRank(0, 0, "n0", state.own.layout, state.own.sizes(), weights=windows.weights())])
    names = tuple(unit.name for unit in state.own.units)
    store.create_arenas(windows.arrange([Bundle((0,), names)]), 1, "m", 0)
    return state, store, windows


def capture(state, store, windows, step):
    """Captures a slice, of a window, as of its step."""
    for kept in store.own:
        if kept.number in windows.due(step):
            store.capture(kept, UnitTensors.of(state.tensors(kept.bundle.units)), BEGUN + step).wait()


def ways_back(group, folder):
    """The way back of a rank, and whether there is another one, as more and more of a window is copied."""
    state, store, windows = make(folder)
    units = state.held()

    def look():
        windows.choose_way(group, BEGUN + 1)
        first = "window" if windows.needed(units) != units else "dense"
        return [first, *(["window" if windows.needed(units) != units else "dense"] if windows.turn_back() else [])]

    capture(state, store, windows, 0)
    found = {"a slice is not copied": look()}
    capture(state, store, windows, 1)
    found["all is copied"] = look()
    state.is_of_version = False  # as in the middle of a replay
    found["the rank is not complete"] = look()
    store.engine.shutdown()
    return found


def test_a_window_is_of_copies_and_what_is_trained_is_whole(tmp_path):
    """The rank trains the last slice at its version: that does not complete the window, as it has no copy."""
    found = alone(ways_back, str(tmp_path))
    assert found == {
        "a slice is not copied": ["dense"],
        "all is copied": ["dense", "window"],
        "the rank is not complete": ["window"],
    }


def meet(choices, **wanted):
    """The numbers of slices that ranks take once all have reported what they know."""
    layout = [
        StageRank(0, rank, "n", "", [], slices=each.report()._replace(**wanted)) for rank, each in enumerate(choices)
    ]
    for each in choices:
        each.agree(layout)
    return [each.steps for each in choices]


def test_a_chosen_number_of_slices_counts_once_its_copies_are_whole(tmp_path):
    _, store, _ = make(tmp_path)
    choices = [SliceChoice(None, store) for _ in range(2)]
    assert meet(choices) == [1, 1], "dense versions at first"
    assert meet(choices, wanted=4) == [1, 1]
    assert [each.change() for each in choices] == [True, True]
    assert [each.steps for each in choices] == [4, 4]
    assert meet(choices) == [1, 1], "a loss before the copies are complete"
    assert [each.change() for each in choices] == [True, True], "it is not forgotten"
    choices[0].settle()
    assert meet(choices) == [4, 4], "one knows that they are, and may have dropped the previous ones"
    assert [each.change() for each in choices] == [False, False]
    assert meet([*choices, SliceChoice(None, store)]) == [4, 4, 4], "a newcomer learns it"
