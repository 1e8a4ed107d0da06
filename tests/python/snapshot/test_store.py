"""The folder of shared memory, whatever else is in it."""

import os

from evermoe.snapshot.store import SnapshotStore
from support.stores import Arenas, contents, model, versions


def test_what_is_no_arena_is_passed_over_and_left(tmp_path):
    folder = tmp_path / "job"
    writer = Arenas(folder)
    writer.write(1, contents(1))
    whole = next(folder.glob("*.arena"))
    (folder / "0000000009-a-folder.arena").mkdir()
    (folder / "0000000009-a-link.arena").symlink_to(whole)
    (folder / "²²²²²²²²²²-0-m.arena").write_bytes(whole.read_bytes())
    os.mkfifo(folder / "0000000001-a-pipe.arena")
    (folder / "notes.txt").write_text("7")
    store = SnapshotStore(folder, model())
    store.check()
    assert versions(Arenas, folder) == [1]
    assert store.newest_generation() == 9
    store.prune(9)
    left = {path.name for path in folder.iterdir()}
    assert left == {"0000000009-a-folder.arena", "0000000009-a-link.arena", "²²²²²²²²²²-0-m.arena", "notes.txt"}
    store.close("a-link")
    store.engine.shutdown()
    writer.close()
