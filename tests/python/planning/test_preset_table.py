"""The presets of Python are those of Rust, in the words that types and options allow."""

from __future__ import annotations

from typing import get_args, get_type_hints

import pytest

from evermoe import _native, presets
from evermoe.planning.placement import POLICIES
from evermoe.planning.presets import PRESET_NAMES, PRESETS, Copying, Preset, PresetName, Selection, levels
from evermoe.planning.recovery import Lagging
from evermoe.planning.schedule import CHUNK_POLICIES


def test_names_are_those_of_rust_and_of_the_options():
    assert tuple(PRESETS) == PRESET_NAMES == get_args(PresetName) == tuple(row["name"] for row in _native.PRESETS)
    groups = [getattr(presets, name) for name in presets.__all__ if name != "PresetOptions"]
    assert {group.name for group in groups} == set(PRESET_NAMES)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_each_word_is_one_that_its_type_allows(preset):
    assert set(get_type_hints(Preset)) == set(preset._fields) == set(_native.PRESETS[0])
    assert preset.copying in get_args(Copying)
    assert preset.selection in get_args(Selection)
    assert preset.lagging in get_args(Lagging)
    assert preset.schedule in (None, *CHUNK_POLICIES)
    assert (preset.schedule is None) == (preset.copying == "nothing")
    assert preset.placement in POLICIES
    assert preset.kinds and len(set(preset.kinds)) == len(preset.kinds)
    assert preset.summary and "\n" not in preset.summary


def test_every_chunk_policy_and_kind_is_used_by_a_preset():
    kinds = get_args(get_args(get_type_hints(Preset)["kinds"])[0])
    assert {preset.schedule for preset in PRESETS.values()} - {None} == set(CHUNK_POLICIES)
    assert {kind for preset in PRESETS.values() for kind in preset.kinds} == set(kinds)


def test_replicas_are_as_asked_for_or_as_the_preset_wants():
    assert [preset.replicas(3, None) for preset in PRESETS.values()] == [1, 1, 1, 1, 3, 1]
    assert {preset.replicas(3, 2) for preset in PRESETS.values()} == {2}
    assert PRESETS["lazarus"].replicas(0, None) == 1
    assert [preset.max_replication for preset in PRESETS.values()] == [None, 2, None, None, None, None]
    assert [name for name, preset in PRESETS.items() if not preset.protects_owners] == ["lazarus"]


def test_levels_are_a_half_and_a_quarter_or_as_asked_for():
    assert (levels(8), levels(8, 3), levels(8, 100, 1)) == ((4, 2), (3, 2), (8, 1))
