"""The claim of a run on a folder: living processes keep it, and dead ones give it up."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from threading import Thread

import pytest

from evermoe.errors import FolderInUse, UnsafeFolder
from evermoe.process import run_claim
from evermoe.process.run_claim import RUN, Run, RunClaim, meeting_point, remove_run

PATIENCE = 40.0
ONE, TWO = (Run("j", nonce, "head:1", "host-7", 4711, 1e9) for nonce in ("one", "two"))
HOLDER = """
import sys
from pathlib import Path
from evermoe.process.run_claim import Run, RunClaim
claim = RunClaim(Path(sys.argv[1]), "the folder")
claim.claim_for(Run.parsed(sys.argv[2].encode()), 0.0)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def running(folder, run):
    """A process that has claimed the folder."""
    command = [sys.executable, "-c", HOLDER, str(folder), run.to_text()]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()
        process.wait(PATIENCE)


def taken(folder, run, patience=0.0):
    claim = RunClaim(folder, "the folder")
    claim.claim_for(run, patience)
    return claim


def test_another_run_is_refused_by_name_while_a_member_lives_stopped_or_not(tmp_path):
    with running(tmp_path, ONE) as process:
        own = taken(tmp_path, ONE)
        assert RunClaim(tmp_path, "").found() == ONE
        own.release()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(FolderInUse) as refused:
            taken(tmp_path, TWO)
        said = str(refused.value)
        assert (
            f"the folder {tmp_path} is in use by another run of job 'j', which process 4711 on host-7 began at" in said
        )
        assert f"with the Lighthouse head:1 (still held on this machine by process {process.pid})" in said
        assert RunClaim(tmp_path, "").found() == ONE
        process.kill()
        process.wait(PATIENCE)
        assert RunClaim(tmp_path, "").found() is None
        taken(tmp_path, TWO).release()
        with pytest.raises(ValueError, match="in use by another run"):
            claim = taken(tmp_path, TWO)
            taken(tmp_path, ONE)
        claim.release()


def test_processes_that_are_about_to_end_are_waited_for(tmp_path):
    with running(tmp_path, ONE) as process:
        thread = Thread(target=process.stdin.close)
        thread.start()
        taken(tmp_path, TWO, PATIENCE).release()
        thread.join()


def test_members_of_one_run_take_a_folder_at_the_same_time(tmp_path):
    found = []
    threads = [Thread(target=lambda: found.append(taken(tmp_path, ONE, PATIENCE))) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 8
    with pytest.raises(FolderInUse):
        taken(tmp_path, TWO)
    for each in found:
        each.release()
    taken(tmp_path, TWO).release()


def test_a_forked_child_does_not_keep_the_folder(tmp_path):
    claim = taken(tmp_path, ONE)
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        os.close(writes)
        os.read(reads, 1)  # until the test is over
        os._exit(0)
    try:
        claim.release()
        taken(tmp_path, TWO, PATIENCE).release()
    finally:
        os.close(writes)
        os.waitpid(child, 0)
        os.close(reads)


def test_damaged_names_are_replaced_and_links_refused(tmp_path):
    for content in (b"", b"{", b"[1]", b'{"job": 1}', ONE.to_text().replace("1000000000.0", '"x"').encode()):
        (tmp_path / RUN).write_bytes(content)
        claim = taken(tmp_path, TWO)
        assert Run.parsed((tmp_path / RUN).read_bytes()) == TWO
        claim.release()
    (tmp_path / RUN).unlink()
    (tmp_path / RUN).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFolder, match=r"run\.json is a link"):
        taken(tmp_path, TWO)
    assert not (tmp_path / "elsewhere").exists()


def test_without_locks_the_next_run_takes_over_and_the_previous_one_finds_that(tmp_path, monkeypatch):
    def no_locks(file, kind):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(run_claim.fcntl, "flock", no_locks)
    one = taken(tmp_path, ONE)
    assert one.refusal() == ""
    two = taken(tmp_path, TWO)
    assert "the folder" in one.refusal()
    assert "was taken over by another run of job 'j'" in one.refusal()
    assert two.refusal() == ""


def test_the_last_member_that_ends_removes_the_name(tmp_path):
    folder = tmp_path / "node"
    folder.mkdir()
    claims = [taken(folder, ONE) for _ in range(2)]
    claims.pop().release()
    remove_run(folder)
    assert (folder / RUN).exists()
    claims.pop().release()
    (folder / "x.arena").touch()
    remove_run(folder)
    assert (folder / RUN).exists()
    (folder / "x.arena").unlink()
    remove_run(folder)
    assert list(folder.iterdir()) == []


def test_a_loopback_lighthouse_is_another_one_on_each_host():
    here = meeting_point(["http://127.0.0.1:1"])
    assert here.startswith("127.0.0.1:1 of ")
    assert meeting_point(["http://localhost:1"]).startswith("localhost:1 of ")
    assert meeting_point(["http://B:1", "http://a:2/"]) == meeting_point(["http://a:2", "http://b:1"]) == "a:2,b:1"
