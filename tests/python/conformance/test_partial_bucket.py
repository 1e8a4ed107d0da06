"""Units that are persisted in an object store, on a real server: killed and late writers, a store that is away."""

from __future__ import annotations

import re
import time
import uuid
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from evermoe._native import digest
from evermoe.checkpoint import partial_bucket
from evermoe.checkpoint.checkpoint_bucket import CheckpointBucket
from evermoe.checkpoint.folder import PERSISTED, read_persisted
from evermoe.checkpoint.object_store import locate
from evermoe.checkpoint.owner import Owner
from evermoe.checkpoint.partial_store import open_partial
from evermoe.checkpoint.saved import Saved, SavedUnit
from evermoe.errors import LeftBehind, PersistFailed
from support.harness import PATIENCE, SERVER, wait_until
from support.persisting import NBYTES, UNITS, Member, content, parts, versions
from support.proxy import Fault

LIMIT = 60.0
LIST = re.compile("list-type=2|comp=list")
"""In the paths of lists: of S3, and of Azure."""
MEMBERS = ["one", "two", "m"]
OLD, NEW = 1 << 40, 2 << 40
"""Versions of two generations begin after these."""


def below(spot, patience=PATIENCE):
    """Where units are persisted at a place."""
    return spot.locate(patience) / PERSISTED


@pytest.fixture
def persisted(behind):
    return below(behind(f"b-{uuid.uuid4().hex[:8]}"))


def saved(version, member, names):
    by_name = {unit.name: unit for unit in UNITS}
    found = {}
    for name in names:
        data = content(name, version)
        pieces = [spec.name for spec in by_name[name].specs]
        found[name] = SavedUnit(digest(data.numpy()), pieces, by_name[name].tensors(data))
    return Saved(version, member, found)


def write(store, version, member="m", names="ab", generation=1):
    """A member's part of a version, from its beginning to its commit."""
    store.commit(store.write(saved(version, member, names)), generation)


# ---- contents


def test_units_share_files_until_these_are_large_and_each_is_read_alone(persisted, monkeypatch, proxy):
    monkeypatch.setattr(partial_bucket, "FILE_BYTES", 2 * NBYTES)
    store = open_partial(persisted, "L")
    write(store, 1, names="abcxy")
    files = {each.file.name for each in store.find_units()}
    assert files == {"units-0.safetensors", "units-1.safetensors", "units-2.safetensors"}
    assert versions(persisted) == {name: [1] for name in "abcxy"}
    proxy.reset()
    assert open_partial(persisted, "M").find_units() == []
    proxy.reset()
    (unit,) = (each for each in store.find_units() if each.unit == "y")
    assert torch.equal(unit.data, content("y", 1))
    assert not [request for request in proxy.requests if "manifest" in request.path and "list" not in request.path]


def test_a_changed_byte_of_a_unit_is_refused_and_the_version_before_is_there(persisted):
    store = open_partial(persisted, "L")
    for version in (1, 2):
        write(store, version)
    newest = next(each for each in store.find_units() if each.unit == "b")
    key = newest.file.key
    data = bytearray(persisted.place.read(key, 1 << 20))
    data[-1] ^= 1
    persisted.place.put(key, bytes(data))
    found = {(each.unit, each.version): each.data for each in store.find_units()}
    assert len(found["b", 2]) == 0
    assert torch.equal(found["b", 1], content("b", 1))
    persisted.place.remove([key])
    assert len(newest.data) == 0


def test_a_damaged_manifest_is_passed_over_with_one_warning(persisted):
    write(open_partial(persisted, "L"), 1)
    write(open_partial(persisted, "L"), 2)
    key = f"{persisted.key}/manifests/persisted-{2:020d}-m.json"
    persisted.place.put(key, persisted.place.read(key, 1 << 20)[:-1])
    with pytest.warns(UserWarning, match=r"saved units are ignored: .*EOF") as told:
        assert versions(persisted) == {"a": [1], "b": [1]}
    assert len(told) == 1


def test_the_generations_of_what_is_there_are_known_to_the_next_job(persisted):
    store = open_partial(persisted, "L")
    write(store, OLD + 3)
    run = locate(persisted.place.url)
    bucket = CheckpointBucket(run.place, Owner("job", "L"), "m")
    assert bucket.newest_generation() == 1
    store.rewind(OLD + 3, 5)
    assert bucket.newest_generation() == 5
    with pytest.raises(ValueError, match="has checkpoints of job 'job', which trained another model"):
        CheckpointBucket(run.place, Owner("next", "M"), "m")


def test_another_job_that_starts_later_has_the_place(persisted):
    run = locate(persisted.place.url)
    CheckpointBucket(run.place, Owner("first", "L"), "m")
    first = open_partial(persisted, "L", "first")
    write(first, 1)
    CheckpointBucket(run.place, Owner("second", "L"), "m")
    with pytest.raises(PersistFailed, match="now belongs to job 'second', not to 'first'"):
        write(first, 2)
    assert versions(persisted) == {"a": [1], "b": [1]}


# ---- writers that are late, or two


def test_a_writer_that_wakes_up_before_its_commit_finds_it_undone(persisted):
    asleep, awake = open_partial(persisted, "L"), open_partial(persisted, "L")
    write(awake, OLD + 1)
    draft = asleep.write(saved(OLD + 2, "one", "ab"))
    awake.rewind(OLD + 1, 2)
    with pytest.raises(LeftBehind, match="members of generation 2 persist here, this one is of generation 1"):
        asleep.commit(draft, 1)
    assert versions(persisted) == {"a": [OLD + 1], "b": [OLD + 1]}
    assert len(parts(persisted)) == 1


def test_a_commit_that_is_under_way_while_it_is_undone_never_is_durable(persisted, proxy):
    """The writer has looked for newer members before there were any."""
    asleep, awake = open_partial(persisted, "L"), open_partial(persisted, "L")
    write(awake, OLD + 1)
    draft = asleep.write(saved(OLD + 2, "one", "ab"))
    proxy.reset(
        lambda request: Fault("hold") if request.method == "PUT" and request.path.endswith("-one.json") else None
    )
    with ThreadPoolExecutor(1) as pool:
        committing = pool.submit(asleep.commit, draft, 1)
        assert proxy.held.wait(LIMIT)
        proxy.fault = lambda request: None
        awake.rewind(OLD + 1, 2)
        proxy.reset()  # the request is dropped, and made again
        with pytest.raises(LeftBehind, match="was given up by members that continued without this one"):
            committing.result(LIMIT)
    assert versions(persisted) == {"a": [OLD + 1], "b": [OLD + 1]}
    assert len(parts(persisted)) == 1


def test_a_commit_whose_answer_is_late_stays_undone(persisted, proxy):
    asleep, awake = open_partial(persisted, "L"), open_partial(persisted, "L")
    draft = asleep.write(saved(OLD + 2, "one", "ab"))
    proxy.reset(
        lambda request: Fault("hold after") if request.method == "PUT" and request.path.endswith(".json") else None
    )
    with ThreadPoolExecutor(1) as pool:
        committing = pool.submit(asleep.commit, draft, 1)
        assert proxy.held.wait(LIMIT)
        proxy.fault = lambda request: None
        assert versions(persisted) == {"a": [OLD + 2], "b": [OLD + 2]}
        awake.rewind(OLD + 1, 2)
        proxy.reset()
        with pytest.raises(LeftBehind, match="was given up"):
            committing.result(LIMIT)
    assert versions(persisted) == {}


def test_what_newer_members_have_persisted_stays_however_late_it_is_rewound(persisted):
    late, quick = open_partial(persisted, "L"), open_partial(persisted, "L")
    write(late, OLD + 1)
    write(late, OLD + 2)
    quick.rewind(OLD + 1, 2)
    write(quick, NEW + 2, generation=2)
    late.rewind(OLD + 1, 2)
    assert versions(persisted) == {"a": [NEW + 2, OLD + 1], "b": [NEW + 2, OLD + 1]}
    quick.rewind(NEW + 2, 3)
    with pytest.raises(LeftBehind, match="members of generation 3 continue without those of 2"):
        late.rewind(OLD + 1, 2)


def test_two_writers_of_one_version_do_not_meet(persisted):
    one, two = open_partial(persisted, "L"), open_partial(persisted, "L")
    drafts = [(one, one.write(saved(1, "one", "ab"))), (two, two.write(saved(1, "two", "bc")))]
    for store, draft in reversed(drafts):
        store.commit(draft, 1)
    assert versions(persisted) == {"a": [1], "b": [1, 1], "c": [1]}


def test_what_the_dead_have_begun_never_becomes_durable_and_goes(persisted):
    dead, live = open_partial(persisted, "L"), open_partial(persisted, "L")
    draft = dead.write(saved(OLD + 1, "dead", "ab"))
    ours = live.write(saved(OLD + 1, "one", "c"))
    live._sweep(["one"], 2)
    assert [name[-3:] for name in parts(persisted)] == ["one"]
    live.commit(ours, 1)
    with pytest.raises(LeftBehind, match="was given up"):
        dead.commit(draft, 1)
    assert versions(persisted) == {"c": [OLD + 1]}


def test_empty_manifests_go_after_a_week_and_old_generations_at_once(persisted):
    store = open_partial(persisted, "L")
    write(store, OLD + 2)
    store.rewind(OLD + 1, 2)
    store.rewind(OLD + 1, 3)
    manifests = f"{persisted.key}/manifests"
    for days, left in ((6, 2), (8, 1)):
        store._sweep(MEMBERS, 3, now=time.time() + days * 86400)
        assert len(persisted.place.below(manifests)) == left
    assert persisted.place.below(manifests)[0][0].endswith("generation-0000000003")
    assert parts(persisted) == []


# ---- kills


def persist_as_process(spot):
    """Run a process that persists a few versions, with a member's own choice of units, and ends."""
    import os

    os.environ |= spot.environment
    member = Member(below(spot), "killed")
    for version, names in ((OLD + 3, "ax"), (OLD + 4, "bx"), (OLD + 5, "ax")):
        member.persist(version, list(names))
    member.persister.close(PATIENCE)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", ["hold", pytest.param("hold after", marks=pytest.mark.long)])
@pytest.mark.long
def test_killed_at_any_change_nothing_is_torn_and_nothing_is_left(proxy, behind, kind):
    name = f"kill-{kind.replace(' ', '-')}"
    before = behind(name)
    first = Member(below(before), "killed")
    for version in (OLD + 1, OLD + 2):
        first.persist(version, list("abx"))
    first.persister.close(PATIENCE)
    killed = 0
    for number in range(1, 100):
        spot = behind(f"{name}-{number}")
        before.copy_to(spot)
        if not proxy.kills(SERVER.Process(target=persist_as_process, args=(spot,)), number, kind):
            break
        killed += 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_what_a_kill_leaves(below(spot))
        spot.clear()
    assert killed > 10


def check_what_a_kill_leaves(where):
    found = versions(where)
    assert found.keys() == set("abx")
    assert all(len(each) >= 2 for each in found.values()), found
    later = Member(where, "later")
    later.persister.rewind(found["x"][0], 2)
    later.persister.store._sweep(["later"], 2)
    for version in (NEW + 6, NEW + 7):
        later.persist(version, list("abx"))
    later.persister.close(PATIENCE)
    assert versions(where) == {name: [NEW + 7, NEW + 6] for name in "abx"}
    assert len(parts(where)) == 2, parts(where)


# ---- a store that is away


def test_a_store_that_is_away_is_told_once_and_the_next_snapshot_gets_there(proxy, behind, join):
    where = below(behind("away"), patience=1.0)
    member = join("m", where=where)
    member.persist(OLD + 1, ["a"])
    proxy.reset(lambda request: Fault("status", 503))
    member.snapshot(OLD + 2, ["a"])
    with pytest.raises(PersistFailed, match=f"version {OLD + 2} was not persisted: .*503"):
        member.persister.flush(PATIENCE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        member.snapshot(OLD + 3, ["b"])
    proxy.reset()
    member.snapshot(OLD + 4, ["b"])
    member.persister.flush(PATIENCE)
    assert versions(where)["b"][0] == OLD + 4
    member.persist(OLD + 5, ["c"])
    assert len(parts(where)) == len(persisted_parts(where)), "what failed is cleaned"
    assert OLD + 2 in [version for version, _ in member.skipped]


def persisted_parts(where):
    return {each.file.parent for each in open_partial(where, "L").find_units()}


def test_what_could_not_be_rewound_goes_before_anything_newer_is_persisted(proxy, behind, join):
    where = below(behind("owed"), patience=1.0)
    one, two = join("one", where=where), join("two", where=where)
    one.persist(OLD + 1, ["a"])
    two.persist(OLD + 2, ["b"])
    proxy.reset(lambda request: Fault("status", 503))
    started = time.monotonic()
    for member in (one, two):
        with pytest.raises(
            PersistFailed, match=f"versions after {OLD + 1} cannot be removed from {where.place.url}.*503"
        ):
            member.persister.rewind(OLD + 1, 2)
    assert time.monotonic() - started < 10
    proxy.reset()
    two.persist(NEW + 2, ["c"])
    assert versions(where) == {"a": [OLD + 1], "c": [NEW + 2]}
    one.persist(NEW + 2, ["a"])
    assert versions(where) == {"a": [NEW + 2, OLD + 1], "c": [NEW + 2]}


def test_a_rewind_does_not_wait_for_a_commit_that_hangs(proxy, behind, join, monkeypatch):
    from evermoe.checkpoint import persister

    monkeypatch.setattr(persister, "LOOK_SECONDS", 0.2)
    where = below(behind("hangs"))
    member = join("m", where=where)
    proxy.reset(lambda request: Fault("hold") if request.path.endswith("-m.json") else None)
    member.snapshot(OLD + 2, ["a"])
    assert proxy.held.wait(LIMIT)
    with pytest.raises(PersistFailed, match=r"cannot be removed from .*: no answer for 0 s"):
        member.persister.rewind(OLD + 1, 2)
    member.snapshot(NEW + 2, ["b"])
    proxy.reset()
    member.persister.flush(PATIENCE)
    wait_until(lambda: versions(where) == {"b": [NEW + 2]}, "what was undone is gone")
    assert member.durable == [(NEW + 2, ["b"])]


def test_reading_while_others_prune_finds_whole_units(persisted, join):
    members = [join(name) for name in ("one", "two")]
    for version in range(OLD + 1, OLD + 13):
        members[version % 2].snapshot(version, ["a", "b"])
        for each in open_partial(persisted, "L").find_units()[:2]:
            assert len(each.data) in (0, NBYTES)
    for member in members:
        member.persister.flush(PATIENCE)
        assert member.persister.error is None
    assert {found[0] for found in versions(persisted).values()} == {OLD + 12}
    assert torch.equal(read_persisted(open_partial(persisted, "L").find_units()[0]), content("a", OLD + 12))


def test_a_save_writes_and_lists_four_times_beside_its_files(persisted, proxy, join):
    """As the pages say; `save_interval` is chosen by it."""
    member = join("one")
    member.persist(1, ["a", "x"])
    proxy.reset()
    member.persist(2, ["a", "x"])
    lists = [each.path for each in proxy.requests if each.method == "GET" and LIST.search(each.path)]
    writes = [each.path for each in proxy.requests if each.method == "PUT"]
    files = [path for path in writes if path.endswith(".safetensors")]
    assert (len(files), len(writes) - len(files) + len(lists)) == (1, 4), proxy.requests
