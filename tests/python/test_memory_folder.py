"""Folders of shared memory on a machine with other users: what one of them has planted is refused by name."""

import itertools
import os
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

import evermoe
from evermoe.errors import UnsafeFolder
from evermoe.launch import LocalJob
from evermoe.process.memory_folder import check_private, job_folder, node_name

STRANGER = 12345
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as two users")


def session_in(folder):
    layer = evermoe.MoE(8, 16, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    return evermoe.Session(
        layer,
        optimizer,
        evermoe.ElasticSampler(64, 8),
        membership=evermoe.Membership(job="j", node="n", memory_dir=str(folder)),
    )


def steps(session, until):
    for step in session.steps(until):
        with step:
            step.backward(session.model(torch.randn(8, 8)).square().mean())


@pytest.fixture
def shared(tmp_path):
    """A folder that all users may write to, as /dev/shm is."""
    folder = tmp_path / "shm"
    folder.mkdir()
    folder.chmod(0o1777)
    for above in itertools.takewhile(
        lambda path: path != Path(tempfile.gettempdir()), [tmp_path, *tmp_path.parents[:-1]]
    ):
        above.chmod(0o755)
    return folder


def make_as_stranger(folder, mode=0o777):
    """Makes a folder as another user."""
    make = ["mkdir", "--mode", f"{mode:o}", str(folder)]
    subprocess.run(make, check=True, user=STRANGER, group=STRANGER, extra_groups=[])


@needs_root
@pytest.mark.parametrize("part", ["", "n"])
def test_folder_that_another_user_has_planted_is_refused(shared, part):
    folder = job_folder(shared, "j")
    if part:
        folder.mkdir(mode=0o700)
        os.chown(folder, STRANGER, STRANGER)
    make_as_stranger(folder / part)
    if part:
        os.chown(folder, 0, 0)
    with pytest.raises(UnsafeFolder, match=rf"{folder / part} belongs to user {STRANGER}, this process runs as user 0"):
        session_in(shared)
    if not part:
        with pytest.raises(UnsafeFolder, match="belongs to user"), LocalJob(["true"], "j", 1, memory_dir=str(shared)):
            pass


@needs_root
def test_folder_that_is_planted_between_start_and_first_step_is_refused(shared):
    session = session_in(shared)
    make_as_stranger(job_folder(shared, "j"))
    with pytest.raises(UnsafeFolder, match="belongs to user"):
        steps(session, 1)


@needs_root
def test_users_do_not_meet(shared):
    assert job_folder(shared, "j").name == "evermoe-0-j"
    make_as_stranger(shared / f"evermoe-{STRANGER}-j", 0o700)
    steps(session_in(shared), 1)
    assert [path.name for path in shared.iterdir()] == [f"evermoe-{STRANGER}-j"]


def test_folder_that_others_may_write_to_is_refused(shared):
    folder = job_folder(shared, "j")
    folder.mkdir()
    folder.chmod(0o770)
    with pytest.raises(UnsafeFolder, match=f"{folder} has mode 770"):
        session_in(shared)
    folder.chmod(0o700)
    steps(session_in(shared), 1)


def test_host_whose_name_is_no_name_of_a_node_says_what_to_set(monkeypatch):
    monkeypatch.setattr("socket.gethostname", lambda: "a host/with spaces")
    with pytest.raises(
        ValueError, match=r"the host's name, in place of which EVERMOE_NODE .* got 'a host/with spaces'"
    ):
        node_name(None)
    assert node_name("n.1") == "n.1"
    with pytest.raises(ValueError, match="expected node to be a name"):
        node_name("../n")


def test_links_are_not_followed(shared, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    folder = job_folder(shared, "j")
    folder.symlink_to(tmp_path)
    for refuse in (lambda: check_private(folder), lambda: session_in(shared)):
        with pytest.raises(UnsafeFolder, match="is a link or a file"):
            refuse()
    folder.unlink()
    folder.mkdir(mode=0o700)
    (folder / "lock").symlink_to(victim)
    with pytest.raises(UnsafeFolder, match="lock is a link"), LocalJob(["true"], "j", 1, memory_dir=str(shared)):
        pass
    assert victim.read_text() == "precious"
