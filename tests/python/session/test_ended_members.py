"""Members whose processes have ended: survivors answer for them at the Lighthouse, which would wait for them."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from evermoe.comm._torchft import torchft
from evermoe.comm.ended_members import EndedMembers, speakers
from evermoe.comm.lighthouse import start_local_lighthouse
from evermoe.comm.messages import Identity, Messages, Told
from support.harness import PATIENCE, wait_until
from support.history import check_history
from support.worker import Fault

HOUR = 3600.0


@pytest.fixture
def patient():
    """Address of a Lighthouse that takes a member for alive for an hour after its last heartbeat, and waits for it."""
    server, address = start_local_lighthouse(heartbeat_limit=HOUR, join_limit=HOUR)
    yield address
    server.shutdown()


def test_killed_members_are_not_waited_for(start_job, patient):
    """Nor is the first again, whose heartbeat is as fresh at the second one's death."""
    job = start_job(lighthouse=patient)
    workers = job.start_all({"b": [Fault("reduce", 4)], "c": [Fault("vote", 9)]}, steps=14)
    assert [each.join() for each in workers] == [0, -9, -9]
    check_history(workers)
    assert [each["members"] for each in workers[0].events("recovered")] == [3, 2, 1]


def test_members_killed_at_a_time_are_not_waited_for(start_job, patient):
    job = start_job(4, lighthouse=patient, copies=3)
    workers = job.start_all({each: [Fault("reduce", 4)] for each in "bd"}, "abcd", steps=9)
    assert [each.join() for each in workers] == [0, -9, 0, -9]
    check_history(workers)
    assert workers[0].events("recovered")[-1]["members"] == 2


class Asking:
    """Members of a job that ask a Lighthouse, each in a thread."""

    def __init__(self, address, names):
        self.answers = {}
        for each in names:  # else the first that asks is alone, as far as the Lighthouse knows
            client = torchft().coordination.LighthouseClient(address, timedelta(seconds=PATIENCE))
            client.heartbeat(each, timedelta(seconds=PATIENCE))
        self._threads = [threading.Thread(target=self._ask, args=(address, each), daemon=True) for each in names]
        for each in self._threads:
            each.start()

    def _ask(self, address, name):
        client = torchft().coordination.LighthouseClient(address, timedelta(seconds=PATIENCE))
        data = {"of": name}  # of no job: it is not looked at here
        self.answers[name] = client.quorum(name, timedelta(seconds=PATIENCE), world_size=1, data=data)

    def answer(self):
        for each in self._threads:
            each.join(PATIENCE)
        first, *others = self.answers.values()
        assert all(each.quorum_id == first.quorum_id for each in others)
        return first


def messages(lighthouse):
    return Messages("a", Identity("job", "layout"), lighthouse, None)


def test_a_set_with_one_that_is_spoken_for_has_another_number(patient):
    """Else a member that was wrongly taken for dead could believe that it was in it, and go on with what it has."""
    before = Asking(patient, "abc").answer()
    with EndedMembers("a", messages(patient)).speaking(patient, {"b"}, ["a", "b", "c"]):
        after = Asking(patient, "ac").answer()
    assert after.quorum_id > before.quorum_id
    names = {each.replica_id: each for each in after.participants}
    assert set(names) == {"a", "b", "c", "ended-b"}
    own = Told("a", "job", {})
    said = messages(patient)
    assert said.read(names.values(), is_established=True) == []
    said.check([own])
    del names["ended-b"]
    said.read(names.values(), is_established=True)
    with pytest.raises(ConnectionError, match="speak for b"):
        said.check([own])


def test_who_speaks_for_itself_is_not_spoken_for(patient):
    ended = EndedMembers("a", messages(patient))
    Asking(patient, "abc").answer()
    with ended.speaking(patient, {"b"}, ["a", "b", "c"]):
        assert len(Asking(patient, "ac").answer().participants) == 4
    ended.forget(["b"])
    wait_until(lambda: not any(each.name == "evermoe-ended" for each in threading.enumerate()), "it is told no more")
    with ended.speaking(patient, set(), ["a", "c"]):
        # The Lighthouse takes the second name for alive as long as its limit: somebody has to answer for it here.
        again = Asking(patient, ["a", "b", "c", "ended-b"]).answer()
    assert {each.replica_id: each.data for each in again.participants}["b"] == {"of": "b"}


def test_the_next_members_in_the_order_of_ranks_speak():
    members = list("abcdef")
    assert speakers("b", members, {"b"}) == ["c", "d"]
    assert speakers("e", members, {"e", "f"}) == ["a", "b"]
    assert speakers("f", members, set(members)) == []


def test_a_lighthouse_that_is_away_is_not_told(caplog):
    caplog.set_level("INFO", "evermoe.comm.ended_members")
    with EndedMembers("a", messages("")).speaking("http://127.0.0.1:9", {"b"}, ["a", "b"]):
        wait_until(lambda: all(f"the name {each}:" in caplog.text for each in ("b", "ended-b")), "both threads say so")
