"""The copying thread through Python: waits, cancels, memory that lives while it is read, kills in mid-capture."""

import gc
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from evermoe import _native
from evermoe._native import Arena, CopyEngine
from evermoe.errors import CaptureCancelled
from support.harness import SERVER, wait_until

UNITS = [("dense", 1000), ("empty", 0), ("layers.0.experts.1", 300_000)]
UNIT_BYTES = 301_000


@pytest.fixture
def path(tmp_path):
    folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else str(tmp_path)
    name = f"{folder}/evermoe-test-{os.getpid()}-{random.randrange(1 << 40):x}"
    yield name
    for made in (name, name + ".new"):
        if os.path.exists(made):
            os.unlink(made)


class Memory:
    """The units' bytes in scattered arrays, as the tensors of a model are."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.units = [
            [rng.integers(0, 256, size, np.uint8) for size in np.diff(np.linspace(0, nbytes, runs + 1).astype(int))]
            for (_, nbytes), runs in zip(UNITS, (3, 1, 500), strict=True)
        ]

    def runs(self):
        return [[(run.ctypes.data, run.nbytes) for run in unit] for unit in self.units]

    def is_in(self, arena, index):
        buffer, digests = arena.buffer(index), arena.digests(index)
        for (_, offset, nbytes), unit, digest in zip(arena.units(), self.units, digests, strict=True):
            stored = buffer[offset : offset + nbytes]
            if not (stored == np.concatenate(unit)).all() or digest != _native.digest(stored):
                return False
        return True


def start(engine, arena, version):
    memory = Memory(version)
    return memory, engine.capture(arena, version, memory.runs(), memory)


def test_a_capture_is_what_a_commit_would_have_made(path):
    arena, engine = Arena.create(path, "", UNITS), CopyEngine(chunk_bytes=4096)
    memory, capture = start(engine, arena, 7)
    assert (capture.index, capture.version, capture.state, capture.done_bytes) == (0, 7, "waiting", 0)
    assert capture.wait(timeout=0) == 0
    engine.open()
    assert capture.wait() == arena.payload_bytes == capture.done_bytes
    assert capture.state == "complete"
    assert capture.seconds_busy > 0
    assert arena.versions() == [(0, 7)]
    assert memory.is_in(arena, 0)
    digests = arena.digests(0)
    arena.begin(8)  # the other buffer
    again = arena.buffer(1)
    again[:] = arena.buffer(0)
    assert arena.commit(1) == digests


def test_bytes_may_be_sent_while_the_rest_is_copied(path):
    arena, engine = Arena.create(path, "", UNITS), CopyEngine()
    memory, capture = start(engine, arena, 1)
    first, _, last = arena.units()
    engine.open(1000 + 50_000)
    assert capture.wait(first[1] + 1000) >= first[1] + 1000
    assert capture.wait(last[1] + 50_000) == last[1] + 50_000
    assert (arena.buffer(0)[last[1] : last[1] + 50_000] == np.concatenate(memory.units[2])[:50_000]).all()
    assert capture.wait(arena.payload_bytes, timeout=0.01) == last[1] + 50_000
    assert capture.state == "copying"
    assert arena.versions() == []
    capture.hurry()
    assert capture.wait(arena.payload_bytes) == arena.payload_bytes


def test_memory_is_kept_until_the_end_and_no_longer(path):
    arena, engine = Arena.create(path, "", UNITS), CopyEngine()
    for version, end in enumerate(["complete", "cancelled", "shut down"]):
        memory, capture = start(engine, arena, version)
        kept = weakref.ref(memory)
        del memory
        gc.collect()
        assert kept() is not None, "the engine will still read it"
        if end == "complete":
            capture.hurry()
            capture.wait()
        elif end == "cancelled":
            capture.cancel()
        else:
            engine.shutdown()
        assert capture.state in {"complete", "cancelled"}
        gc.collect()
        assert kept() is None, end


def test_a_cancel_wakes_who_waits_in_other_threads(path):
    arena, engine = Arena.create(path, "", UNITS), CopyEngine()
    _, capture = start(engine, arena, 1)
    caught = []

    def wait():
        with pytest.raises(CaptureCancelled, match="the capture of version 1 was cancelled: by its caller") as error:
            capture.wait()
        caught.append(error)

    waiting = [threading.Thread(target=wait) for _ in range(3)]
    for thread in waiting:
        thread.start()
    capture.cancel()
    for thread in waiting:
        thread.join(60)
    assert len(caught) == 3
    assert (capture.state, arena.versions()) == ("cancelled", [])


def test_a_wait_can_be_interrupted(path):
    arena, engine = Arena.create(path, "", UNITS), CopyEngine()
    _, capture = start(engine, arena, 1)

    class Interrupted(Exception):
        pass

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Interrupted):
            capture.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert capture.state == "waiting"


def test_shutdown_twice_and_calls_after_it(path):
    arena, engine = Arena.create(path, "", UNITS), CopyEngine()
    _, capture = start(engine, arena, 1)
    engine.shutdown()
    engine.shutdown()
    engine.open()
    engine.close_gate()
    capture.hurry()
    capture.cancel()
    with pytest.raises(CaptureCancelled, match="the engine was shut down"):
        capture.wait(0)
    with pytest.raises(ValueError, match="the engine was shut down"):
        start(engine, arena, 2)


def test_wrong_calls_are_value_errors_and_begin_nothing(path):
    arena, engine = Arena.create(path, "", UNITS), CopyEngine()
    runs = Memory(1).runs()
    for version in (1, 2):
        memory, capture = start(engine, arena, version)
        capture.hurry()
        capture.wait()
    with pytest.raises(ValueError, match="expected 3 units, got 2"):
        engine.capture(arena, 3, runs[:2], memory)
    with pytest.raises(ValueError, match=r'unit "layers.0.experts.1": expected runs of 300000 bytes in all, got'):
        engine.capture(arena, 3, [runs[0], [], runs[2][1:]], memory)
    with pytest.raises(ValueError, match="are outside the address space"):
        engine.capture(arena, 3, [[(0, 1000)], [], runs[2]], memory)
    assert [version for _, version in arena.versions()] == [2, 1]
    with pytest.raises(ValueError, match="at most"):
        capture.wait(arena.payload_bytes + 1)
    for timeout in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="timeout: expected seconds"):
            capture.wait(timeout=timeout)
    assert capture.wait(timeout=float("inf")) == arena.payload_bytes
    with pytest.raises(ValueError, match="chunk_bytes"):
        CopyEngine(chunk_bytes=0)
    _, capture = start(engine, arena, 3)
    with pytest.raises(ValueError, match="version 3 is still being captured"):
        start(engine, arena, 4)


def test_the_thread_yields_to_others(path):
    arena, engine = Arena.create(path, "", UNITS), CopyEngine()
    _, capture = start(engine, arena, 1)
    capture.hurry()
    capture.wait()
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    tasks = [int(task) for task in os.listdir("/proc/self/task") if name_of(task) == "evermoe-copy"]
    found = {(os.sched_getscheduler(task), os.getpriority(os.PRIO_PROCESS, task)) for task in tasks}
    assert (os.SCHED_BATCH, min(own + 5, 19)) in found


def name_of(task):
    with open(f"/proc/self/task/{task}/comm", encoding="utf-8") as file:
        return file.read().strip()


def capture_and_die(path, nbytes):
    """Captures versions 1 and 2, then stops the engine at a byte of version 3, and dies."""
    arena, engine = Arena.create(path, "", UNITS), CopyEngine(chunk_bytes=4096)
    for version in (1, 2):
        _memory, capture = start(engine, arena, version)
        capture.hurry()
        capture.wait()
    _memory, capture = start(engine, arena, 3)
    engine.open(nbytes)
    first, _, last = arena.units()
    reached = first[1] + nbytes if nbytes < 1000 else last[1] + nbytes - 1000
    capture.wait(reached if 0 < nbytes < UNIT_BYTES else nbytes and None, timeout=60)
    assert capture.state == ("waiting" if nbytes == 0 else "complete" if nbytes == UNIT_BYTES else "copying")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("nbytes", [0, 1, 999, 1001, 150_000, UNIT_BYTES - 1, UNIT_BYTES])
def test_a_kill_in_mid_capture_leaves_the_last_complete_version(path, nbytes):
    child = SERVER.Process(target=capture_and_die, args=(path, nbytes))
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    arena = Arena.open(path)
    assert [version for _, version in arena.versions()] == ([3, 2] if nbytes == UNIT_BYTES else [2])
    for index, version in arena.versions():
        assert arena.verify(index) == []
        assert Memory(version).is_in(arena, index)
    engine = CopyEngine()
    memory, capture = start(engine, arena, 9)
    capture.hurry()
    capture.wait()
    assert [version for _, version in arena.versions()] == [9, 3 if nbytes == UNIT_BYTES else 2]
    assert memory.is_in(arena, capture.index)


def capture_for_ever(path):
    arena, engine = Arena.create(path, "", UNITS), CopyEngine(chunk_bytes=10_000)
    engine.open()
    for version in itertools.count(1):
        _memory, capture = start(engine, arena, version)
        capture.wait()


def test_a_kill_at_any_moment_leaves_only_complete_versions(path):
    rng = random.Random(11)
    for _ in range(6):
        child = SERVER.Process(target=capture_for_ever, args=(path,), daemon=True)
        child.start()
        wait_until(lambda: os.path.exists(path) and Arena.open(path).versions(), "a version exists")
        time.sleep(rng.uniform(0.0, 0.01))
        child.kill()
        child.join()
        arena = Arena.open(path)
        assert arena.versions(), "a version existed before the kill"
        for index, version in arena.versions():
            assert Memory(version).is_in(arena, index)
        arena.unlink()


def test_a_process_ends_with_captures_under_way(path):
    code = """
import sys
import numpy as np
from evermoe._native import Arena, CopyEngine
arena, engine = Arena.create(sys.argv[1], "", [("unit", 300_000)]), CopyEngine(chunk_bytes=100)
memory = np.ones(300_000, np.uint8)
capture = engine.capture(arena, 1, [[(memory.ctypes.data, memory.nbytes)]], memory)
engine.open()
"""
    command = [sys.executable, "-c", code, path]
    done = subprocess.run(command, check=False, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def fork_beside_a_capture(path):
    arena, engine = Arena.create(path, "", UNITS), CopyEngine()
    memory, capture = start(engine, arena, 1)
    child = os.fork()
    if child == 0:
        engine.shutdown()
        del engine
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    engine.open()
    assert capture.wait() == arena.payload_bytes and memory.is_in(arena, 0)


def test_a_forked_child_leaves_the_engine_alone(path):
    process = SERVER.Process(target=fork_beside_a_capture, args=(path,))
    process.start()
    process.join(60)
    assert process.exitcode == 0
