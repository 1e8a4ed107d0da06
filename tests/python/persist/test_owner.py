"""A checkpoint folder belongs to one job at a time. The error of another names that job."""

import signal
import subprocess
import sys
from contextlib import closing, contextmanager

import pytest

from evermoe.checkpoint.checkpoint_folder import CheckpointFolder, find
from evermoe.checkpoint.owner import Claim, Owner, read_owner, write_owner
from evermoe.errors import PersistFailed
from support.harness import PATIENCE
from support.models import make

HOLD = """
import sys
from pathlib import Path
from evermoe.checkpoint.owner import Claim, Owner
claim = Claim(Path(sys.argv[1]), Owner(sys.argv[2], "L"), is_used=True)
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def running(folder, job):
    """A process of a job that has the folder; killed at the end."""
    command = [sys.executable, "-c", HOLD, str(folder), job]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()
        process.wait(PATIENCE)


def claim(folder, job, layout="L", is_used=True):
    return closing(Claim(folder, Owner(job, layout), is_used=is_used))


def test_another_job_is_refused_by_name_while_a_member_lives(tmp_path):
    with running(tmp_path, "first") as one, claim(tmp_path, "first"):
        with pytest.raises(ValueError, match="belongs to job 'first', which is running; this is job 'second'"):
            Claim(tmp_path, Owner("second", "L"), is_used=True)
        one.kill()
        one.wait(PATIENCE)
        with pytest.raises(ValueError, match="belongs to job 'first', which is running"):
            Claim(tmp_path, Owner("second", "L"), is_used=True)
    with claim(tmp_path, "second"):
        assert read_owner(tmp_path) == Owner("second", "L")
        with pytest.raises(ValueError, match="belongs to job 'second'"):
            Claim(tmp_path, Owner("first", "L"), is_used=True)


def test_a_stopped_process_keeps_the_folder_until_it_dies(tmp_path):
    with running(tmp_path, "first") as one:
        one.send_signal(signal.SIGSTOP)
        with pytest.raises(ValueError, match="belongs to job 'first'"):
            Claim(tmp_path, Owner("second", "L"), is_used=True)
        one.kill()
        one.wait(PATIENCE)
        Claim(tmp_path, Owner("second", "L"), is_used=True).close()


def test_another_model_is_refused_where_something_is_saved(tmp_path):
    with claim(tmp_path, "first", is_used=False):
        pass
    for job in ("first", "second"):
        with pytest.raises(
            ValueError, match=r"has checkpoints of job 'first', which trained another model.*or another state_bytes"
        ):
            Claim(tmp_path, Owner(job, "M"), is_used=True)
    with claim(tmp_path, "second", "M", is_used=False):
        assert read_owner(tmp_path) == Owner("second", "M")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "[" * 60_000, '{"format":2,"job":7,"layout":"L"}', '{"format":9,"job":"a","layout":"L"}']
)
def test_an_owner_that_cannot_be_read_is_none(tmp_path, text):
    (tmp_path / "owner.json").write_text(text)
    assert read_owner(tmp_path) is None
    with claim(tmp_path, "first"):
        assert read_owner(tmp_path) == Owner("first", "L")


def test_a_damaged_owner_is_none_and_not_another_job(tmp_path):
    write_owner(tmp_path, Owner("first", "L"))
    intact = (tmp_path / "owner.json").read_bytes()
    for bit in range(8 * len(intact)):
        damaged = bytearray(intact)
        damaged[bit // 8] ^= 1 << bit % 8
        (tmp_path / "owner.json").write_bytes(damaged)
        assert read_owner(tmp_path) in (None, Owner("first", "L"))
    with claim(tmp_path, "first"):
        assert (tmp_path / "owner.json").read_bytes() == intact


def test_a_job_whose_folder_was_taken_over_writes_nothing_more(tmp_path):
    """As where the file system has no locks: the next job cannot know that this one runs."""
    layout = make("sgd")[2].catalog.layout
    with closing(CheckpointFolder(tmp_path, Owner("first", layout), "m")) as folder:
        draft = folder.draft(1, 1, "first")
        folder.create_draft(draft)
        write_owner(tmp_path, Owner("second", layout))
        for attempt in (lambda: folder.publish(draft, 1, "{}"), lambda: folder.create_draft(draft)):
            with pytest.raises(PersistFailed, match="now belongs to job 'second', not to 'first'"):
                attempt()
    assert find(tmp_path) == {}
