"""Units that several members save in parts: visible once all parts are, and never mixed from two versions."""

from __future__ import annotations

import os

import pytest
import torch

from evermoe.checkpoint.folder import DATA, find_persisted, folder_name
from evermoe.checkpoint.manifest import Part
from support.persisting import NBYTES, content, versions

CUT = 64
BOTH = ("one", "two")


@pytest.fixture
def two_members(join):
    """Members that save a unit each, and half of `x`."""
    one, two = join("one"), join("two")

    def save(version, *, first=True, second=True):
        if first:
            one.persist(version, ["a"], {"x": (0, CUT)}, BOTH)
        if second:
            two.persist(version, ["y"], {"x": (CUT, NBYTES)}, BOTH)

    return save


def test_a_unit_is_visible_once_all_its_parts_are(tmp_path, two_members):
    two_members(2, second=False)
    assert versions(tmp_path) == {"a": [2]}
    two_members(2, first=False)
    assert versions(tmp_path) == {"a": [2], "x": [2], "y": [2]}


def test_parts_of_two_versions_are_no_unit(tmp_path, two_members):
    two_members(2, second=False)
    two_members(3, first=False)
    assert "x" not in versions(tmp_path)


def test_parts_that_members_who_are_gone_have_saved_are_not_in_the_way(tmp_path, join, two_members):
    join("gone").persist(2, ["b"], {"x": (0, CUT // 2)}, ["gone", "lost"])
    two_members(2)
    assert versions(tmp_path)["x"] == [2]


def test_a_damaged_part_damages_the_unit(tmp_path, two_members):
    two_members(2)
    path = tmp_path / folder_name(2, "two") / DATA
    data = path.read_bytes()
    at = data.index(content("x", 2).numpy().tobytes()[CUT:])
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    (found,) = (each for each in find_persisted(tmp_path, "L") if each.unit == "x")
    assert len(found.data) == 0
    path.unlink()
    assert len(found.data) == 0


def test_versions_of_which_parts_are_still_to_come_stay_until_a_newer_one_is_complete(tmp_path, two_members):
    two_members(2)
    for version in (3, 4, 5, 6, 7):  # the other one is slow, and leaves out all but 5
        two_members(version, second=False)
    assert versions(tmp_path)["x"] == [2]
    two_members(5, first=False)
    assert versions(tmp_path)["x"] == [5, 2]
    assert {int(name.split("-")[1]) for name in os.listdir(tmp_path)} >= {5, 6, 7}
    two_members(7, first=False)
    two_members(8)
    assert versions(tmp_path)["x"] == [8, 7]
    assert {int(name.split("-")[1]) for name in os.listdir(tmp_path)} == {7, 8}


def test_a_part_needs_the_digest_of_the_complete_unit(join):
    member = join()
    view = member.persister.begin_snapshot(1, {"x": Part(0, CUT, NBYTES)}, BOTH)["x"]
    assert view.shape == (CUT,)
    assert view.dtype == torch.uint8
    with pytest.raises(ValueError, match=r"digests: expected those of \['x'\]"):
        member.persister.commit()


@pytest.mark.parametrize("part", [Part(64, 32, NBYTES), Part(0, NBYTES + 1, NBYTES), Part(0, 32, NBYTES - 1)])
def test_a_part_that_a_unit_does_not_have_is_refused(join, part):
    with pytest.raises(ValueError, match=f"units: x: expected {NBYTES} bytes, got"):
        join().persister.begin_snapshot(1, {"x": part}, BOTH)
