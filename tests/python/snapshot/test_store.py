"""The folder of shared memory, whatever else is in it."""

import os

from evermoe.copies.snapshot.bundles import Bundle
from evermoe.copies.snapshot.store import SnapshotStore
from support.stores import Arenas, contents, model, versions


def test_what_is_no_arena_is_passed_over_and_left(tmp_path):
    folder = tmp_path / "job"
    writer = Arenas(folder)
    writer.write(1, contents(1))
    arena = next(folder.glob("*.arena"))
    (folder / "0000000009-a-folder.arena").mkdir()
    (folder / "0000000009-a-link.arena").symlink_to(arena)
    (folder / "²²²²²²²²²²-0-m.arena").write_bytes(arena.read_bytes())
    os.mkfifo(folder / "0000000001-a-pipe.arena")
    (folder / "notes.txt").write_text("7")
    store = SnapshotStore(folder, model())
    store.check_folder()
    assert versions(Arenas, folder) == [1]
    assert store.newest_generation() == 9
    store.prune(9)
    left = {path.name for path in folder.iterdir()}
    assert left == {"0000000009-a-folder.arena", "0000000009-a-link.arena", "²²²²²²²²²²-0-m.arena", "notes.txt"}
    store.close("a-link")
    store.engine.shutdown()
    writer.close()


def test_arenas_that_nothing_came_into_make_room_for_the_next(tmp_path):
    """As where members change again before the copies of the previous change are complete."""
    store = SnapshotStore(tmp_path / "job", model())
    unit = store.state.catalog.units[0].name
    planned = [Bundle((0,), (unit,)), Bundle((0, 1), (store.state.catalog.units[1].name,))]
    store.create_arenas(planned, 1, "m", 0)
    kept = store.own[0].arena
    kept.commit(kept.begin(7))
    SnapshotStore(tmp_path / "job", store.state, engine=store.engine).create_arenas(planned, 2, "other", 1)
    for generation in (2, 3):
        store.create_arenas(planned, generation, "m", 0, reserves=False)
    names = sorted(path.name for path in store.directory.iterdir())
    assert names == [
        "0000000001-0-m.arena",
        "0000000002-1-other.arena",
        "0000000003-0-m.arena",
        "0000000003-1-m.arena",
    ]
    store.engine.shutdown()
