"""Holders of copies under `moetion`, with a complete optimizer on each member and with parts of it: real processes.

In ZeRO's terms: what all have needs no copy, and a part that one alone has goes to as many others as it takes.
"""

from __future__ import annotations

from collections import Counter

import pytest

from support.harness import FEWEST
from support.history import check_history
from support.worker import Fault


def check_holders(arranged, members, copies):
    """Of an arrangement of members on nodes of their own; the number of units that are copied."""
    holders, active = arranged["holders"], arranged["active"]
    assert holders.keys() == active.keys()
    kept_for = {rank: set() for rank in range(members)}
    for unit, (kind, primary, others) in holders.items():
        assert primary in active[unit]
        assert len({*active[unit], *others}) >= min(copies, members), unit
        assert not {*active[unit]} & {*others}, f"{unit} is sent to who has it"
        assert len(others) == max(0, min(copies, members) - len(active[unit])), f"{unit} is sent as often as it must be"
        assert (kind == "active") == (not others)
        if len(active[unit]) == 1:
            for rank in others:
                kept_for[rank].add(primary)
    counts = Counter({rank: len(senders) for rank, senders in kept_for.items()})
    assert max(counts.values()) - min(counts.values()) <= 1, counts
    return sum(bool(others) for _, _, others in holders.values())


@pytest.mark.parametrize("copies", [2, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("dense", ["replicated", "sharded"])
def test_each_unit_is_on_enough_nodes_and_nothing_is_sent_that_peers_have(start_job, dense, copies):
    job = start_job(
        4,
        preset="moetion",
        shard_optimizer=dense == "sharded",
        replication=copies,
        profile_steps=0,
        **FEWEST,
        join_interval=50,
    )
    workers = job.start_all({"b": [Fault("vote", 3)]}, "abcd", steps=6)
    assert [each.join() for each in workers] == [0, -9, 0, 0]
    check_history(workers)
    for each in workers[::2]:
        before, after = each.events("protection_planned")[0], each.events("protection_planned")[-1]
        copied = [check_holders(before, 4, copies), check_holders(after, 3, copies)]
        others = [unit for unit in after["holders"] if "experts" not in unit]
        alone = [unit for unit in others if len(after["active"][unit]) == 1]
        assert bool(alone) == (dense == "sharded"), "what is no expert has one owner, or is everywhere"
        assert all(copied)
