"""Background decisions: all members get the same one, in the group that began it or not at all."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch

from evermoe.comm.background_consensus import BackgroundConsensus
from evermoe.comm.group import Group
from evermoe.comm.tags import CHECKPOINT
from evermoe.errors import PeerLost
from support.ranks import members, run_threads

LIMIT = 10.0


def test_a_single_member_decides_alone():
    assert BackgroundConsensus(Group(), CHECKPOINT).decide(("a", 1), lambda said: said) == [["a", 1]]


def decide_in_turns(group, folder):
    found, _ = members(group, folder, LIMIT)
    councils = [BackgroundConsensus(found, CHECKPOINT) for _ in range(3)]
    long = "é" * 100_000
    decided = [
        council.decide({"rank": found.rank, "of": number, "long": long}, lambda said: {"said": said, "by": found.rank})
        for number, council in enumerate(councils)
    ]
    group.all_reduce(torch.ones(1))
    return decided


def test_all_members_get_the_decision_of_rank_0(tmp_path):
    ranks = run_threads(tmp_path, 3, decide_in_turns, str(tmp_path))
    for number in range(3):
        said = [{"rank": rank, "of": number, "long": "é" * 100_000} for rank in range(3)]
        assert [decided[number] for decided in ranks] == [{"said": said, "by": 0}] * 3


def lose_one(group, folder):
    """Rank 2 leaves without a report."""
    found, transport = members(group, folder, LIMIT)
    council = BackgroundConsensus(found, CHECKPOINT)
    if found.rank == 2:
        transport.drop("it dies")
        return "dropped"
    with pytest.raises(PeerLost) as lost:
        council.decide(found.rank, lambda said: said)
    return str(lost.value)


def test_a_lost_member_prevents_the_decision_and_all_others_learn_it(tmp_path):
    assert run_threads(tmp_path, 3, lose_one, str(tmp_path)) == ["a member no longer answers"] * 2 + ["dropped"]


def outlive_the_group(group, folder):
    """Rank 0 must not receive the report of rank 1 in the next group and decide with it."""
    found, transport = members(group, folder, LIMIT)
    old = BackgroundConsensus(found, CHECKPOINT)
    outcome = []

    def decide():
        try:
            outcome.append(old.decide("old", lambda said: said))
        except PeerLost as lost:
            outcome.append(str(lost))

    deciding = threading.Thread(target=decide)
    if found.rank == 0:
        deciding.start()
    addresses = [each.decode() for each in group.all_gather_bytes(transport.address.encode())]
    transport.connect(99, group.rank, addresses, timedelta(seconds=LIMIT), timedelta(seconds=LIMIT))
    if found.rank == 1:
        deciding.start()
    deciding.join(LIMIT)
    new = BackgroundConsensus(found, CHECKPOINT).decide("new", lambda said: said)
    group.all_reduce(torch.ones(1))
    return outcome, new, transport.broken


def test_a_consensus_of_an_earlier_group_takes_no_part_in_the_next(tmp_path):
    first, second = run_threads(tmp_path, 2, outlive_the_group, str(tmp_path))
    assert first == (["a member no longer answers"], ["new", "new"], None)
    assert second[1:] == (["new", "new"], None)
    assert "failed" in second[0][0]


def test_a_dropped_group_has_no_consensus(tmp_path):
    with pytest.raises(PeerLost, match="the next group begins"):
        run_threads(tmp_path, 2, drop_first, str(tmp_path))


def drop_first(group, folder):
    found, transport = members(group, folder, LIMIT)
    transport.drop("the next group begins")
    BackgroundConsensus(found, CHECKPOINT)
