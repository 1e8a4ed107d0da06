"""Hardware that a job refuses: all members read the same lists, and refuse the same newcomers."""

from __future__ import annotations

import itertools
import json
from types import SimpleNamespace

import pytest

from evermoe._native import encode_lift
from evermoe.comm.messages import Identity, Messages
from evermoe.comm.quarantine import MAX_QUARANTINES, WRITERS, Quarantine, Quarantines, merged
from evermoe.errors import UnfitNode
from support.messages import told

HARDWARE = {"a": "GPU-1", "b": "GPU-2", "c": "GPU-3", "d": "GPU-4"}
FAULTY = Quarantine("c-1", "c", "GPU-3", "Xid 79")


@pytest.fixture
def members():
    """Members "a" and "b" of a job, of which only "a" knows that GPU-3 is faulty; "c" comes on it, "d" on another."""
    found = {
        name: Messages(name, Identity("job", "layout"), "http://one,http://two", None, HARDWARE[name])
        for name in HARDWARE
    }
    found["a"].quarantines.add(FAULTY)
    return found


def read(members, reader, others=(), established="ab"):
    """The members whom one finds in the Lighthouse's set."""
    data = {name: told(each, 3, is_established=name in established) for name, each in members.items()}
    named = [SimpleNamespace(replica_id=name, data=each) for name, each in (data | dict(others)).items()]
    return [each.id for each in members[reader].read_members(named, is_established=reader in established)]


def lift(name, job="job"):
    return {"lift-1": json.loads(encode_lift("lift-1", job, name))}


def test_all_members_refuse_a_newcomer_on_the_hardware_of_one_list(members, caplog):
    for reader in "abd":
        assert read(members, reader) == ["a", "b", "d"], reader
        assert (
            "ignoring 'c' at the Lighthouse: quarantine: it is on GPU-3 of c, which c-1 has left: Xid 79" in caplog.text
        )
        caplog.clear()
        assert list(members[reader].quarantines) == [FAULTY], "it is received with the messages"
    with pytest.raises(UnfitNode, match="evermoe lighthouse quarantine http://one --job job --lift GPU-3") as error:
        read(members, "c")
    assert error.value.hardware == "GPU-3"


def test_members_that_have_state_stay(members):
    assert read(members, "a", established="abc") == ["a", "b", "c", "d"]


def test_lists_of_newcomers_do_not_count(members):
    """Otherwise a process that was refused elsewhere could keep others from a job that starts."""
    assert read(members, "d", established="b") == ["a", "b", "c", "d"]


@pytest.mark.parametrize("name", ["GPU-3", "c", "c-1"])
def test_an_operator_lifts_a_quarantine_by_its_hardware_its_node_or_the_member(members, name):
    assert read(members, "b", lift("another")) == read(members, "b", lift(name, "another")) == ["a", "b", "d"]
    assert read(members, "c", lift(name)) == ["a", "b", "c", "d"]
    assert read(members, "b", lift(name)) == ["a", "b", "c", "d"]
    assert read(members, "a") == ["a", "b", "c", "d"], "it has learnt it from the message of b"
    members["b"].quarantines.add(again := Quarantine("c-2", "c", "GPU-3", "Xid 95"))
    assert read(members, "a") == ["a", "b", "d"], "a later fault counts"
    assert again in list(members["a"].quarantines)


def test_lists_merge_to_the_same_one_in_any_order():
    lifted, second = Quarantine("a-1", "a", "a", "why", True), Quarantine("b-1", "b", "b", "why")
    said = [[Quarantine("a-1", "a", "a", "why"), second], [lifted], [second]]
    for order in itertools.permutations(said):
        found = Quarantines()
        for each in order:
            found.merge(each)
        assert set(found) == {lifted, second}
    assert Quarantine("b-1", "b", "b", "why", True) in merged([found.fields()], ["b"])


def test_lists_have_room_in_the_answer_of_a_lighthouse():
    """It must be smaller than 4 MiB, whatever the number of members."""
    full = Quarantines()
    for number in range(2 * MAX_QUARANTINES):
        full.add(Quarantine(f"node-{number}-12345678", "node", "GPU-" + "0" * 36, "x" * 1000))
    for size in (1, 7, 8, 100, 1024):
        written = 0
        for rank in range(size):
            full.choose_writers(rank, size)
            written += bool(full.fields())
        assert min(size, WRITERS) <= written < 2 * WRITERS
        full.choose_writers(0, size)
        assert written * len(json.dumps(full.fields())) < 3 << 19


def test_a_list_has_room_in_a_message(members):
    members["a"].quarantines.merge(Quarantine(f"x-{n}", "x", "GPU-9", "why") for n in range(2 * MAX_QUARANTINES))
    assert len(list(members["a"].quarantines)) == MAX_QUARANTINES
    assert read(members, "b") == ["a", "b", "d"]
