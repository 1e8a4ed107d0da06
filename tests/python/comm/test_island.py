"""Islands in messages and groups: the options that support them, their ranks, and the group of each position."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from evermoe.comm.endpoint import LOOPBACK, find_endpoint
from evermoe.comm.island import Island
from evermoe.comm.island_watch import IslandWatch
from evermoe.comm.member_groups import MemberGroups
from evermoe.comm.membership import MembershipManager
from evermoe.comm.mesh import LOCAL
from evermoe.comm.messages import Identity, Messages
from evermoe.comm.reachability import Reachability
from evermoe.comm.transport import Transport
from evermoe.config.membership import Membership
from evermoe.errors import PeerLost
from support.harness import PATIENCE
from support.messages import told
from support.ranks import run_threads

ADDRESS = "http://127.0.0.1:9"
"""Of a Lighthouse that is never asked."""
CPU = torch.device("cpu")
LIMIT = timedelta(seconds=PATIENCE)


def member(island, lighthouse=ADDRESS, **options):
    """A member that asks nobody."""
    joining = Membership(lighthouse=lighthouse, job="job", **options)
    identity = Identity("job", "layout")
    return MembershipManager(joining, lighthouse=lighthouse, identity=identity, node="n", device=CPU, island=island)


@pytest.mark.parametrize(("name", "position", "size"), [("a", 2, 2), ("a", -1, 2), ("a", 0, 0), ("a/b", 0, 1)])
def test_an_island_has_a_name_and_a_position(name, position, size):
    with pytest.raises(ValueError, match=r"position from 0 to|expected the island to be a name"):
        Island(name, position, size)


def test_ranks_are_sorted_by_island_then_position():
    islands = [Island(name, position, 11) for name in ("a", "a-b", "a.b", "b") for position in range(11)]
    found = sorted(reversed(islands), key=lambda each: each.rank_key)
    assert sorted(found, key=islands.index) == islands
    assert all(each.name == found[rank // 11 * 11].name for rank, each in enumerate(found))
    for position in range(11):
        assert [found[rank].position for rank in Island("a", position, 11).position_ranks(44)] == 4 * [position]


def test_islands_need_one_lighthouse_and_members_that_train():
    island = Island("a", 1, 2)
    for role in ("spare", "replica"):
        with pytest.raises(ValueError, match=f"members of islands train: expected role train, got '{role}'"):
            member(island, role=role)
    with pytest.raises(ValueError, match="must be at one Lighthouse: expected one address"):
        member(island, lighthouse="http://127.0.0.1:9,http://127.0.0.1:10")
    found = member(island)
    try:
        assert (found.island, found.groups.position.size) == (island, 1)
        message = found.requests._message({"established": False} | STANDING, 0.0, waits=True)
        [read] = found.messages.read_members([SimpleNamespace(replica_id=found.id, data=message)], is_established=False)
        assert read.data["island"] == {"name": "a", "position": 1, "size": 2}
        assert read.data["rank_key"] == "a/000001"
    finally:
        found.close()


STANDING = {
    "epoch": None,
    "size": 0,
    "generation": 0,
    "state": 0,
    "has_progress": False,
    "named": [],
    "adopted": 0,
    "inquires": False,
    "is_done": False,
    "is_spare": False,
    "last_group": None,
    "known": 0,
    "begun": [],
}


def test_all_members_of_a_job_have_islands_of_one_size():
    found = [member(island) for island in (Island("a", 0, 2), Island("b", 0, 3), None)]
    try:
        two, three, none = (each.identity for each in found)
    finally:
        for each in found:
            each.close()
    assert [each.options["island size"] for each in (two, three, none)] == ["2", "3", "none"]
    first = SimpleNamespace(replica_id="a", data=told(Messages("a", two, ADDRESS, None), 3))
    for other, text in ((three, "3"), (none, "none")):
        messages = Messages("b", other, ADDRESS, None)
        with pytest.raises(ValueError, match=f"island size is {text} here, 2 on the other worker"):
            messages.read_members(
                [first, SimpleNamespace(replica_id="b", data=told(messages, 0, 9, False))], is_established=False
            )


def connect_islands(group, folder):
    """Three islands of two; returns the sums over this rank's position, and over all."""
    island = Island("abc"[group.rank // 2], group.rank % 2, 2)
    reach = Reachability("a", find_endpoint(None, [ADDRESS]))
    groups = MemberGroups(LOCAL, Transport(LOOPBACK, LOOPBACK), LIMIT, IslandWatch(island, reach, 60.0), CPU, None)
    members = [(str(rank), reach.address) for rank in range(6)]
    groups.rebuild(1, dist.FileStore(f"{folder}/meeting", 6), members, group.rank, 6)
    mine = torch.tensor([float(10**group.rank)])
    position, trainers = (each.all_reduce(mine.clone()).item() for each in (groups.position, groups.trainers))
    place = groups.position.rank, groups.position.size
    group.all_reduce(torch.zeros(1))  # nobody drops its groups before all have their sums
    if group.rank == 3:
        groups.trainers.drop("the island is lost")
    for each in (groups.trainers, groups.position):  # those of the other position lose it, too
        with pytest.raises(PeerLost):
            each.all_reduce(mine)
    groups.close()
    reach.close()
    return place, position, trainers


def test_the_group_of_a_position_connects_it_over_all_islands(tmp_path):
    found = run_threads(tmp_path, 6, connect_islands, str(tmp_path))
    assert [each[0] for each in found] == [(0, 3), (0, 3), (1, 3), (1, 3), (2, 3), (2, 3)]
    assert [each[1] for each in found] == [10101, 101010] * 3
    assert {each[2] for each in found} == {111111}


def test_an_island_waits_for_a_process_that_answers_and_is_slow_to_ask():
    own, other = (Reachability(name, find_endpoint(None, [ADDRESS])) for name in ("a", "b"))
    watch = IslandWatch(Island("x", 0, 2), own, 60.0)
    try:
        watch.connect([("a", own.address), ("b", other.address)], 0)
        watch.drop_alone("a peer is lost")
        assert not watch.awaits_slow(["a", "b"])
        assert watch.awaits_slow(["a"])
        other.close()
        assert not watch.awaits_slow(["a"])
    finally:
        watch.end()
        own.close()
        other.close()


def test_the_watch_of_an_island_ends_though_another_thread_has_just_begun_it(monkeypatch):
    own = Reachability("a", find_endpoint(None, [ADDRESS]))
    watch = IslandWatch(Island("x", 0, 2), own, 60.0)
    begins, start = threading.Event(), threading.Thread.start

    def start_late(thread):
        if thread.name == "evermoe-island":
            begins.set()
            time.sleep(0.2)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    watch.connect([("a", own.address), ("b", own.address)], 0)
    dropping = threading.Thread(target=watch.drop_alone, args=["a peer is lost"])
    dropping.start()
    assert begins.wait(PATIENCE)
    watch.end()
    dropping.join()
    own.close()
