"""Members whose processes have ended: survivors answer for them at the Lighthouse, which would wait for them."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from typing import NamedTuple

import pytest

from evermoe.comm._torchft import torchft
from evermoe.comm.ended_members import EndedMembers, reporters
from evermoe.comm.lighthouse import start_local_lighthouse
from evermoe.comm.messages import Identity, MemberReport, Messages
from evermoe.comm.reachability import LOOPBACK, Endpoint, Reachability
from support.harness import PATIENCE, wait_until
from support.history import check_history
from support.worker import Fault

HOUR = 3600.0


class Spoken(NamedTuple):
    """One of a set, as torchft has it."""

    replica_id: str
    data: dict


@pytest.fixture
def patient():
    """Address of a Lighthouse that takes a member for alive for an hour after its last heartbeat, and waits for it."""
    server, address = start_local_lighthouse(heartbeat_timeout=HOUR, join_timeout=HOUR)
    yield address
    server.shutdown()


def test_a_killed_member_is_not_waited_for(start_job, patient):
    job = start_job(lighthouse=patient)
    workers = job.start_all({"b": [Fault("reduce", 4)]}, steps=9)
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    assert [each["members"] for each in workers[0].events("recovered")] == [3, 2]


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


def messages(member="a"):
    return Messages(member, Identity("job", "layout"), "http://elsewhere:1", None)


class Job:
    """A member of a job, and what it knows of others."""

    def __init__(self, member="a"):
        self.reach = Reachability(member, Endpoint(LOOPBACK, LOOPBACK))
        self.ended = EndedMembers(member, messages(member), self.reach)

    def reporting_ended(self, address, gone, members):
        self.reach.ended.update(gone)
        return self.ended.reporting_ended(address, list(members))

    def told(self, members):
        """Return what the members of this job that speak for themselves say: they all know this one's port."""
        return [MemberReport(each, "job", {"probe_address": self.reach.address}) for each in members]


def test_a_set_with_one_that_is_spoken_for_has_another_number(patient):
    """Else a member that was wrongly taken for dead could conclude that it was in it, and continue with what it has."""
    before = Asking(patient, "abc").answer()
    with Job().reporting_ended(patient, "b", "abc"):
        after = Asking(patient, "ac").answer()
    assert after.quorum_id > before.quorum_id
    names = {each.replica_id: each for each in after.participants}
    assert set(names) == {"a", "b", "c", "ended-b"}
    assert judged(names) == ("", True)
    assert judged(names, group="abc") == ("", True)
    assert "d sent no request" in judged(names, group="abcd")[0]
    assert "ended-b" in names
    del names["ended-b"]
    problem, is_named = judged(names)
    assert "whether b has ended" in problem
    assert is_named


def judged(names, told="ac", group=""):
    """Return what is wrong with a set, and whether it names "a", whose members `told` speak for themselves."""
    said = messages()
    said.read_members(names.values(), is_established=True)
    members = [MemberReport(each, "job", {}) for each in told]
    return said.problem(members, group), said.names_this_member(members)


def test_one_that_lives_does_not_believe_that_it_has_ended(patient):
    """Nor do others where it speaks for itself: they ask again."""
    with Job("b").reporting_ended(patient, "a", "abc"):
        answer = Asking(patient, "bc").answer()
        while len(answer.participants) < 4:
            answer = Asking(patient, "bc").answer()
    names = {each.replica_id: each for each in answer.participants}
    assert judged(names, told="bc") == (
        "other members report that this member's process has ended",
        False,
    )
    problem, is_named = judged({"ended-a": names["ended-a"]}, told="abc")
    assert "whether a has ended" in problem
    assert not is_named


def nobody_speaks():
    return not any(each.name == "evermoe-ended" for each in threading.enumerate())


def test_who_speaks_for_itself_is_not_spoken_for(patient):
    job = Job()
    Asking(patient, "abc").answer()
    with job.reporting_ended(patient, "b", "abc"):
        assert len(Asking(patient, "ac").answer().participants) == 4
    job.ended.check_set(1, job.told("abc"), "abc")
    wait_until(nobody_speaks, "it gets no more reports")
    job.reach.ended.clear()
    with job.reporting_ended(patient, "", "ac"):
        # The Lighthouse takes the other name for alive as long as its limit: somebody has to answer for it here.
        again = Asking(patient, ["a", "b", "c", "ended-b"]).answer()
    assert {each.replica_id: each.data for each in again.participants}["b"] == {"of": "b"}


def test_one_that_asked_before_it_ended_is_spoken_for_when_members_ask_again():
    """Its probe server refuses connections, unlike a live member's."""
    job, gone = Job(), Reachability("b", Endpoint(LOOPBACK, LOOPBACK))
    told = [*job.told("a"), MemberReport("b", "job", {"probe_address": gone.address})]
    with job.reporting_ended("http://127.0.0.1:9", "b", "ab"):
        pass
    gone.close()
    wait_until(
        lambda: bool(job.reach.probe({"b": gone.address})) and job.reach.ended == {"b"}, "the probe server is closed"
    )
    job.ended.check_set(1, told, "ab")
    assert job.reach.ended == {"b"}
    job.ended.check_set(2, told[:1], "a")
    assert job.reach.ended == set()


def test_members_that_do_not_answer_are_asked_again_in_time_though_the_lighthouse_is_asked_meanwhile():
    job, back = Job(), Reachability("b", Endpoint(LOOPBACK, LOOPBACK))
    job.reach.unreachable = {"b": back.address}
    job.reach.probe({"c": "127.0.0.1:1"})
    pause = 0.2
    end = time.monotonic() + PATIENCE
    while job.reach.unreachable and time.monotonic() < end:
        with job.reporting_ended("http://127.0.0.1:9", "", "a"):
            pass
        job.ended.check_set(1, job.told("a"), "a")
        job.reach.unreachable.pop("c", None)
        job.reach.probe_again(pause)
        time.sleep(pause / 10)
    assert not job.reach.unreachable


def test_one_that_lives_after_all_has_not_ended():
    job, alive = Job(), Reachability("b", Endpoint(LOOPBACK, LOOPBACK))
    with job.reporting_ended("http://127.0.0.1:9", "b", "ab"):
        pass
    job.ended.check_set(1, [*job.told("a"), MemberReport("b", "job", {"probe_address": alive.address})], "ab")
    assert job.reach.ended == set()


def spoken(job, gone, members):
    """Whether it speaks; there is no Lighthouse, so that it continues while it asks."""
    wait_until(nobody_speaks, "nobody speaks")
    with job.reporting_ended("http://127.0.0.1:9", gone, members):
        return not nobody_speaks()


def test_where_there_is_doubt_nobody_speaks():
    for gone, members in (("b", "ab"), ("bc", "abc"), ("bc", "abcd")):
        assert not spoken(Job(), gone, members)  # it may be "a" that is cut off
    assert spoken(Job(), "de", "abcde")
    for is_alone in (True, False):
        alone = Job()
        alone.ended = EndedMembers("a", messages(), alone.reach, reports=not is_alone)
        assert spoken(alone, "b", "abc") != is_alone
    for doubts in (1, 2):
        job = Job()
        for number in range(doubts):
            with pytest.raises(ConnectionError, match="a message that differs"):
                job.ended.check_set(number, job.told("c"), "abc")
        assert spoken(job, "b", "abc") == (doubts < 2)  # one may have what "b" asked before it ended
        assert spoken(job, "b", "abd")  # another group


def test_the_number_of_a_set_that_is_not_believed_is_noted_by_those_that_it_names():
    """Or those that resume later take it for one in which others resumed without them."""
    said = messages()
    ended = EndedMembers("a", said, Reachability("a", Endpoint(LOOPBACK, LOOPBACK)))
    told = [MemberReport(each, "job", {"probe_address": "127.0.0.1:1"}) for each in "ac"]
    said.read_members([Spoken("b", said.write_ended("b")["b"])], is_established=True)
    with pytest.raises(ConnectionError, match="whether b has ended"):
        ended.check_set(7, told, "abc")
    assert said.refused == 7
    with pytest.raises(ConnectionError, match="a message that differs"):
        ended.check_set(8, told[1:], "abc")
    assert said.refused is None


def test_the_next_members_in_the_order_of_ranks_speak():
    members = list("abcdef")
    assert reporters("b", members, {"b"}) == ["c", "d"]
    assert reporters("e", members, {"e", "f"}) == ["a", "b"]
    assert reporters("f", members, set(members)) == []


def test_a_lighthouse_that_is_away_gets_no_report(caplog):
    caplog.set_level("INFO", "evermoe.comm.ended_members")
    with Job().reporting_ended("http://127.0.0.1:9", "b", "abc"):
        wait_until(
            lambda: all(f"the name {each} failed:" in caplog.text for each in ("b", "ended-b")), "both threads say so"
        )
