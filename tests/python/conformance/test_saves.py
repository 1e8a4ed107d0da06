"""Saves of some units, in a folder and on real servers: a version per unit, two of each expert, never a torn one."""

from __future__ import annotations

import itertools
import os
import warnings
from pathlib import Path

import pytest
import torch

from evermoe._native import digest
from evermoe.checkpoint import checkpoint_bucket
from evermoe.checkpoint.checkpoint_store import find, find_manifests
from evermoe.checkpoint.copying import copy
from evermoe.checkpoint.manifest import MANIFEST, SAVE, Part, Row, manifest_text, read_manifest, read_units
from evermoe.checkpoint.unit_share import Share
from evermoe.errors import CorruptCopy, PersistFailed
from evermoe.state.version import step_of
from support.harness import SERVER
from support.kills import kill_at_each_operation
from support.places import Spot, Stop, Writer, all_whole, another_spot, forget, make_spot
from support.server_fixtures import SERVERS
from support.stores import contents, model, names

EXPERTS, DENSE = model().catalog.experts(), model().catalog.dense()
OLD = 3 << 40
"""Versions of the members that write first begin after it."""


@pytest.fixture(params=["folder", *SERVERS])
def spot(request, monkeypatch):
    """A place of each kind."""
    return make_spot(request.param, request, monkeypatch)


def saves(spot):
    """The complete saves, newest first, as another process finds them."""
    forget()
    return find_manifests(spot.locate(), model().catalog.layout, (SAVE,))[::-1]


def held(spot):
    """Unit → steps of its versions, newest first; all of them are read."""
    found = {}
    for saved in (saved for manifest in saves(spot) for saved in manifest.saved):
        assert torch.equal(saved.data, contents(step_of(saved.version))[saved.unit]), (saved.unit, saved.version)
        found.setdefault(saved.unit, set()).add(step_of(saved.version))
    return {unit: sorted(steps, reverse=True) for unit, steps in found.items()}


def newest(spot):
    """Unit → steps of its version in the newest save."""
    return {unit: step_of(saved.version) for unit, saved in saves(spot)[0].units.items()}


def files(spot):
    """Names of all files with units."""
    return {name for name in spot.files() if name.endswith(".safetensors")}


def used(spot):
    """Names of the files that saves use."""
    return {"/".join(file) for manifest in saves(spot) for file in manifest.files}


def test_units_that_a_save_does_not_contain_stay_in_their_files(spot):
    writer = Writer(spot)
    assert saves(spot) == []
    writer.save(1, EXPERTS)
    writer.save(2, EXPERTS[:1])
    assert newest(spot) == dict.fromkeys(DENSE, 2) | {EXPERTS[0]: 2} | dict.fromkeys(EXPERTS[1:], 1)
    assert held(spot) == {key: [2, 1] for key in [*DENSE, EXPERTS[0]]} | {key: [1] for key in EXPERTS[1:]}
    assert find(spot.locate()) == {}, "a save is no checkpoint"


def test_two_versions_of_each_unit_stay_and_no_file_that_is_not_used(spot):
    writer = Writer(spot)
    writer.save(1, EXPERTS)
    expected = {expert: [1] for expert in EXPERTS}
    for step, expert in zip(range(2, 11), itertools.cycle(EXPERTS), strict=False):
        writer.save(step, [expert])
        expected[expert] = [step, *expected[expert]]
        found = held(spot)
        assert len(saves(spot)) == 2
        assert {unit: found[unit] for unit in DENSE} == {key: [step, step - 1] for key in DENSE}
        for each, steps in expected.items():
            assert found[each][:2] == steps[:2]
            assert len(found[each]) <= 3
        assert files(spot) == used(spot)


def test_a_save_without_an_earlier_one_needs_all_units(spot):
    writer = Writer(spot)
    write = writer.begin_save(1, EXPERTS[:2])
    with pytest.raises(PersistFailed, match=f"no earlier save has {EXPERTS[2]} and 1 other units"):
        write.wait_published()
    assert write.needs_all
    assert saves(spot) == []
    writer.save(2, EXPERTS)
    assert newest(spot) == dict.fromkeys(names(), 2)


def test_saves_that_a_recovery_has_undone_are_removed_and_later_ones_stay(spot):
    before, after = Writer(spot, 3), Writer(spot, 4)
    before.save(1, EXPERTS)
    for step in (2, 3):
        before.save(step, EXPERTS[:1])
    assert after.store.newest_save(OLD | 2, 4).version == OLD | 2
    assert held(spot)[EXPERTS[0]] == [2, 1]
    after.save(3, EXPERTS[1:2], resumed_from=OLD | 2)
    late = Writer(spot, 4)
    assert late.store.newest_save(OLD | 2, 4).version == 4 << 40 | 3
    assert newest(spot) == dict.fromkeys(DENSE, 3) | {EXPERTS[0]: 2, EXPERTS[1]: 3} | dict.fromkeys(EXPERTS[2:], 1)
    assert after.store.newest_save(0, 5) is None
    forget()
    after.store.sweep(5)
    with pytest.raises(PersistFailed, match="no earlier save has"):
        after.save(4, EXPERTS[:1], resumed_from=0)


def test_a_version_that_is_saved_again_replaces_the_first(spot):
    writer = Writer(spot)
    writer.save(1, EXPERTS)
    writer.save(2, EXPERTS[:1])
    writer.save(2, EXPERTS[1:2])
    assert newest(spot) == dict.fromkeys([*DENSE, *EXPERTS[:2]], 2) | dict.fromkeys(EXPERTS[2:], 1)


def test_a_changed_byte_of_an_expert_is_refused_and_the_version_before_is_there(spot):
    writer = Writer(spot)
    writer.save(1, EXPERTS)
    writer.save(2, EXPERTS[:1])
    for step in (3, 4):
        writer.save(step, EXPERTS[1:2])
    saved = saves(spot)[0].saved
    two, one = (each for each in saved if each.unit == EXPERTS[0])
    (file,) = {f"{row.origin}/{row.file}" for row in two.rows}
    data = bytearray(spot.read(file))
    data[data.index(contents(2)[EXPERTS[0]].numpy().tobytes())] ^= 1
    spot.write(file, bytes(data))
    assert [step_of(each.version) for each in (two, one)] == [2, 1]
    assert len(two.data) == 0
    assert torch.equal(one.data, contents(1)[EXPERTS[0]])
    spot.remove(file)
    assert len(two.data) == 0


def test_a_damaged_manifest_is_passed_over_with_one_warning(spot):
    writer = Writer(spot)
    writer.save(1, EXPERTS)
    writer.save(2, EXPERTS[:1])
    path = writer.save(3, EXPERTS[1:2])
    spot.write(f"{path.name}/{MANIFEST}", spot.read(f"{path.name}/{MANIFEST}")[:-1])
    with pytest.warns(UserWarning, match="a checkpoint is ignored: .*is not a manifest of a checkpoint") as told:
        assert newest(spot)[EXPERTS[1]] == 1
    assert len(told) == 1
    later = Writer(spot)
    later.save(4, EXPERTS[2:3])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert newest(spot) == dict.fromkeys(DENSE, 4) | {EXPERTS[0]: 2, EXPERTS[1]: 1, EXPERTS[2]: 4, EXPERTS[3]: 1}


def test_checkpoints_and_saves_remove_only_their_own_kind(spot):
    writer = Writer(spot)
    writer.save(1, EXPERTS)
    for step in range(1, 5):
        writer.write(step)
        writer.save(step + 1, EXPERTS[step - 1 : step])
    assert all_whole(spot) == [4, 3]
    assert [step_of(manifest.version) for manifest in saves(spot)] == [5, 4]
    assert held(spot)[EXPERTS[0]] == [2, 1]


def test_a_save_goes_on_while_a_checkpoint_is_written(spot):
    writer = Writer(spot)
    writer.save(1, EXPERTS)
    slow = Writer(spot, member="slow")
    stop = Stop(slow.store)
    checkpoint = slow.begin(2)
    stop.wait()
    for step in (2, 3, 4):
        writer.save(step, EXPERTS[:1])
    stop.go_on()
    checkpoint.wait_published()
    writer.save(5, EXPERTS[:1])
    assert all_whole(spot) == [2]
    assert held(spot)[EXPERTS[0]] == [5, 4, 3]
    assert {name for name in files(spot) if name.startswith(SAVE)} == used(spot)


def test_a_save_that_is_late_is_given_up_by_newer_members(spot):
    asleep, awake = Writer(spot, 3, "asleep"), Writer(spot, 4, "awake")
    asleep.save(1, EXPERTS)
    stop = Stop(asleep.store)
    late = asleep.begin_save(2, EXPERTS[:1])
    stop.wait()
    sweep = getattr(awake.store, "_sweep", awake.store.sweep)
    sweep(4)
    awake.save(2, EXPERTS[1:2], resumed_from=OLD | 1)
    stop.go_on()
    with pytest.raises(PersistFailed):
        late.wait_published()
    assert newest(spot) == dict.fromkeys([*DENSE, EXPERTS[1]], 2) | dict.fromkeys([EXPERTS[0], *EXPERTS[2:]], 1)


def test_another_job_that_starts_later_has_the_place(spot):
    if not spot.is_bucket:
        pytest.skip("a folder is locked")
    first = Writer(spot, job="first")
    first.save(1, EXPERTS)
    Writer(spot, job="second")
    with pytest.raises(PersistFailed, match="now belongs to job 'second', not to 'first'"):
        first.save(2, EXPERTS[:1])
    assert held(spot)[EXPERTS[0]] == [1]


def test_generations_of_saves_are_known_to_the_next_job(spot):
    writer = Writer(spot, 7)
    writer.save(1, EXPERTS)
    assert writer.store.newest_generation() == 7
    writer.close()
    with pytest.raises(ValueError, match="has checkpoints of job 'job', which trained another model"):
        open_for_another_model(spot)


def open_for_another_model(spot):
    from evermoe.checkpoint.checkpoint_store import open_store
    from evermoe.checkpoint.owner import Owner

    open_store(spot.locate(), Owner("next", "M"), "m")


def test_saves_are_not_copied_as_checkpoints(spot):
    writer = Writer(spot)
    path = writer.save(1, EXPERTS)
    with pytest.raises(ValueError, match="is a save, whose units have several versions: expected a checkpoint"):
        copy(read_manifest(path), another_spot(spot).locate())


# ---- parts


def save_in_parts(writer, step, cut=64):
    """Two ranks save the first unit that is no expert together, and the second one all other units."""
    version, unit = OLD | step, model().catalog.by_name[DENSE[0]]
    data = contents(step)[unit.name]
    draft = writer.store.draft(version, 3, f"word{step}", SAVE)
    value, nbytes = digest(data.numpy()), len(data)
    rows = writer.store.write(draft, 0, [Share(unit, data[:cut], Part(0, cut, nbytes), value)])
    others = [Share(model().catalog.by_name[name], contents(step)[name]) for name in names() if name != unit.name]
    rows += writer.store.write(draft, 1, [Share(unit, data[cut:], Part(cut, nbytes, nbytes), value), *others])
    return writer.store.publish(draft, version, manifest_text(version, model().catalog.layout, rows))


def test_a_unit_that_two_ranks_save_is_read_from_both_files(spot):
    writer = Writer(spot)
    path = save_in_parts(writer, 1)
    assert held(spot) == {key: [1] for key in names()}
    found = saves(spot)[0].units[DENSE[0]]
    assert len(found.files) == 2
    with pytest.raises(CorruptCopy, match=f"has {DENSE[0]} in parts, which only a session can read"):
        list(read_units(read_manifest(path), names()))
    row = found.rows[1]
    name = f"{row.origin}/{row.file}"
    data = bytearray(spot.read(name))
    data[data.index(contents(1)[DENSE[0]].numpy().tobytes()[64:])] ^= 1
    spot.write(name, bytes(data))
    assert len(found.data) == 0
    spot.remove(name)
    assert len(found.data) == 0


def test_parts_of_superseded_units_go_before_experts_that_are_still_used(spot):
    writer = Writer(spot)
    save_in_parts(writer, 1)
    for step in (2, 3):
        writer.save(step, EXPERTS[:1])
    assert held(spot) == {key: [3, 2] for key in DENSE} | {EXPERTS[0]: [3, 2, 1]} | {key: [1] for key in EXPERTS[1:]}
    assert files(spot) == used(spot)


def test_units_of_a_save_share_files_in_an_object_store(request, monkeypatch):
    spot = make_spot(SERVERS[0] if isinstance(SERVERS[0], str) else SERVERS[0].values[0], request, monkeypatch)
    writer = Writer(spot)
    writer.save(1, EXPERTS)
    assert len(files(spot)) == 1
    monkeypatch.setattr(checkpoint_bucket, "FILE_BYTES", 1)
    writer.save(2, EXPERTS[:1])
    assert held(spot)[EXPERTS[0]] == [2, 1]
    changed = {name for name in DENSE if not torch.equal(contents(1)[name], contents(2)[name])}
    assert len(files(spot)) == 1 + 1 + len(changed), "units that have not changed stay in their file"


# ---- kills


def write_saves(folder: Path) -> None:
    """Save all units, then an expert at a time, and note each step once it is saved."""
    writer = Writer(Spot(str(folder)))
    for step, experts in ((1, EXPERTS), (2, EXPERTS[:1]), (3, EXPERTS[1:2]), (4, EXPERTS[:1])):
        writer.save(step, experts)
        with open(f"{folder}.saved", "ab", buffering=0) as file:
            file.write(bytes([step]))
    writer.close()


@pytest.mark.few(1)
def test_killed_at_any_operation_the_newest_save_is_complete(tmp_path):
    contents(4)
    runs = kill_at_each_operation(tmp_path / "runs", write_saves)
    assert len(runs) > 20
    for run in runs:
        told = Path(f"{run}.saved")
        last = told.read_bytes()[-1] if told.exists() else 0
        found = saves(Spot(str(run)))
        assert [step_of(each.version) for each in found[:1]] in ([last] * bool(last), [last + 1]), run.name
        for each in found[:2]:
            for saved in each.saved:
                is_damaged = not torch.equal(saved.data, contents(step_of(saved.version))[saved.unit])
                assert not is_damaged or (each is not found[0] and len(saved.data) == 0), (run.name, saved)
    later = Writer(Spot(str(runs[len(runs) // 2])), 5)
    later.store.sweep(5)
    for step in (5, 6):
        later.save(step, EXPERTS)
    spot = Spot(str(runs[len(runs) // 2]))
    assert files(spot) == used(spot)


def save_as_process(spot: Spot) -> None:
    """Run a process that saves experts, one at a time, and ends."""
    os.environ |= spot.environment
    writer = Writer(spot, 3, "killed")
    for step, experts in ((3, EXPERTS[:1]), (4, EXPERTS[1:2]), (5, EXPERTS[:1])):
        writer.save(step, experts)
    writer.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["hold", "hold after"])
@pytest.mark.long
def test_killed_at_any_change_nothing_is_torn_and_nothing_is_left(proxy, behind, kind):
    name = f"saves-{kind.replace(' ', '-')}"
    before = behind(name)
    first = Writer(before)
    first.save(1, EXPERTS)
    first.save(2, EXPERTS[:1])
    killed = 0
    for number in range(1, 100):
        spot = behind(f"{name}-{number}")
        before.copy_to(spot)
        if not proxy.kills(SERVER.Process(target=save_as_process, args=(spot,)), number, kind):
            break
        killed += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_what_a_kill_leaves(spot)
        spot.clear()
    assert killed > 10


def check_what_a_kill_leaves(spot):
    assert held(spot).keys() == {*names()}
    later = Writer(spot, 4, "later")
    later.store.newest_save(saves(spot)[0].version, 4)
    later.store._sweep(4)
    for step in (6, 7):
        later.save(step, EXPERTS)
    forget()
    later.store._sweep(4)
    assert newest(spot) == dict.fromkeys(names(), 7)
    assert files(spot) == used(spot)


def test_rows_name_the_files_of_the_save_itself_without_an_origin(tmp_path):
    writer = Writer(Spot(str(tmp_path)))
    path = writer.save(1, EXPERTS)
    assert '"origin"' not in (path / MANIFEST).read_text()
    assert all(isinstance(row, Row) and row.origin == path.name for row in read_manifest(path).rows)
