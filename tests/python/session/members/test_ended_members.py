"""Members whose processes have ended: survivors report them to the Lighthouse, which would wait for them."""

from __future__ import annotations

import json
import threading
import time
from datetime import timedelta
from typing import NamedTuple

import pytest

from evermoe.comm._torchft import coordination
from evermoe.comm.ended_members import EndedMembers, reporters
from evermoe.comm.endpoint import LOOPBACK, Endpoint
from evermoe.comm.lighthouse import start_local_lighthouse
from evermoe.comm.messages import Identity, MemberReport, Messages
from evermoe.comm.reachability import Reachability
from support.harness import PATIENCE, wait_until
from support.history import check_history
from support.messages import told
from support.worker import Fault

HOUR = 3600.0


class Participant(NamedTuple):
    """A participant of a set, like torchft's."""

    replica_id: str
    data: dict


@pytest.fixture
def patient():
    """Address of a Lighthouse that considers a member alive for an hour after its last heartbeat, and waits for it."""
    server, address = start_local_lighthouse(heartbeat_timeout=HOUR, join_timeout=HOUR)
    yield address
    server.shutdown()


def test_no_member_waits_for_a_killed_one(start_job, patient):
    job = start_job(lighthouse=patient)
    workers = job.start_all({"b": [Fault("reduce", 4)]}, steps=9)
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    assert [each["members"] for each in workers[0].events("recovered")] == [3, 2]


class Asking:
    """Members of a job that request a set from a Lighthouse, each in a thread."""

    def __init__(self, address, names):
        self.answers = {}
        for each in names:  # otherwise the Lighthouse would know only the first that asks
            client = coordination().LighthouseClient(address, timedelta(seconds=PATIENCE))
            client.heartbeat(each, timedelta(seconds=PATIENCE))
        self._threads = [threading.Thread(target=self._ask, args=(address, each), daemon=True) for each in names]
        for each in self._threads:
            each.start()

    def _ask(self, address, name):
        client = coordination().LighthouseClient(address, timedelta(seconds=PATIENCE))
        data = {"of": name}  # of no job, as this test does not read it
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
    """A member of a job, with its view of the others."""

    def __init__(self, member="a"):
        self.reach = Reachability(member, Endpoint(LOOPBACK, LOOPBACK))
        self.ended = EndedMembers(member, messages(member), self.reach)

    def reporting_ended(self, address, gone, members):
        self.reach.ended.update(gone)
        return self.ended.reporting_ended(address, list(members))

    def reports(self, members):
        """Return the reports of live members, all with the address of this member's probe server."""
        return [MemberReport(each, "job", {"probe_address": self.reach.address}) for each in members]


def test_a_set_with_a_reported_member_has_another_number(patient):
    """Otherwise a live member that was wrongly reported could take that set for one with its own request."""
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


def judged(names, alive="ac", group=""):
    """Return the problem of a set in which the members `alive` have requested it, and whether it names "a"."""
    own = messages()
    own.read_members(names.values(), is_established=True)
    members = [MemberReport(each, "job", {}) for each in alive]
    return own.problem(members, group), own.names_this_member(members)


def test_a_live_member_rejects_a_set_that_reports_it(patient):
    """Others also reject a set that contains both its request and a report of it: they request again."""
    with Job("b").reporting_ended(patient, "a", "abc"):
        answer = Asking(patient, "bc").answer()
        while len(answer.participants) < 4:
            answer = Asking(patient, "bc").answer()
    names = {each.replica_id: each for each in answer.participants}
    assert judged(names, alive="bc") == (
        "other members report that this member's process has ended",
        False,
    )
    problem, is_named = judged({"ended-a": names["ended-a"]}, alive="abc")
    assert "whether a has ended" in problem
    assert not is_named


def nothing_is_reported():
    return not any(each.name == "evermoe-ended" for each in threading.enumerate())


def test_a_member_that_requests_a_set_is_not_reported(patient):
    job = Job()
    Asking(patient, "abc").answer()
    with job.reporting_ended(patient, "b", "abc"):
        assert len(Asking(patient, "ac").answer().participants) == 4
    job.ended.check_set(1, job.reports("abc"), "abc")
    wait_until(nothing_is_reported, "the reports end")
    job.reach.ended.clear()
    with job.reporting_ended(patient, "", "ac"):
        # The Lighthouse considers the other name alive until its limit, so the test has to request under it.
        again = Asking(patient, ["a", "b", "c", "ended-b"]).answer()
    assert {each.replica_id: each.data for each in again.participants}["b"] == {"of": "b"}


def test_a_member_that_ended_after_its_request_is_reported_with_the_next_one():
    """Its probe server refuses connections, unlike a live member's."""
    job, gone = Job(), Reachability("b", Endpoint(LOOPBACK, LOOPBACK))
    reports = [*job.reports("a"), MemberReport("b", "job", {"probe_address": gone.address})]
    with job.reporting_ended("http://127.0.0.1:9", "b", "ab"):
        pass
    gone.close()
    wait_until(
        lambda: bool(job.reach.probe({"b": gone.address})) and job.reach.ended == {"b"}, "the probe server is closed"
    )
    job.ended.check_set(1, reports, "ab")
    assert job.reach.ended == {"b"}
    job.ended.check_set(2, reports[:1], "a")
    assert job.reach.ended == set()


def test_silent_members_are_probed_again_in_time_between_requests_to_the_lighthouse():
    job, back = Job(), Reachability("b", Endpoint(LOOPBACK, LOOPBACK))
    job.reach.unreachable = {"b": back.address}
    job.reach.probe({"c": "127.0.0.1:1"})
    pause = 0.2
    end = time.monotonic() + PATIENCE
    while job.reach.unreachable and time.monotonic() < end:
        with job.reporting_ended("http://127.0.0.1:9", "", "a"):
            pass
        job.ended.check_set(1, job.reports("a"), "a")
        job.reach.unreachable.pop("c", None)
        job.reach.probe_again(pause)
        time.sleep(pause / 10)
    assert not job.reach.unreachable


def test_a_member_that_answers_again_has_not_ended():
    job, alive = Job(), Reachability("b", Endpoint(LOOPBACK, LOOPBACK))
    with job.reporting_ended("http://127.0.0.1:9", "b", "ab"):
        pass
    job.ended.check_set(1, [*job.reports("a"), MemberReport("b", "job", {"probe_address": alive.address})], "ab")
    assert job.reach.ended == set()


def sends_reports(job, gone, members):
    """Return whether a member sends reports; without a Lighthouse they continue as long as its request."""
    wait_until(nothing_is_reported, "no report is sent")
    with job.reporting_ended("http://127.0.0.1:9", gone, members):
        return not nothing_is_reported()


def test_a_member_in_doubt_sends_no_reports():
    for gone, members in (("b", "ab"), ("bc", "abc"), ("bc", "abcd")):
        assert not sends_reports(Job(), gone, members)  # it may be "a" that is cut off
    assert sends_reports(Job(), "de", "abcde")
    for is_alone in (True, False):
        alone = Job()
        alone.ended = EndedMembers("a", messages(), alone.reach, reports=not is_alone)
        assert sends_reports(alone, "b", "abc") != is_alone
    for doubts in (1, 2):
        job = Job()
        for number in range(doubts):
            with pytest.raises(ConnectionError, match="a message that differs"):
                job.ended.check_set(number, job.reports("c"), "abc")
        # One inconsistent set may contain a request that "b" sent before it ended.
        assert sends_reports(job, "b", "abc") == (doubts < 2)
        assert sends_reports(job, "b", "abd")  # another group


def test_members_store_the_number_of_a_rejected_set_that_names_them():
    """Otherwise members that resume later would take it for a set in which others resumed without them."""
    own = messages()
    ended = EndedMembers("a", own, Reachability("a", Endpoint(LOOPBACK, LOOPBACK)))
    data = json.loads(told(own, 1)["message"])
    reports = [MemberReport(each, "job", data | {"probe_address": "127.0.0.1:1"}) for each in "ac"]
    own.read_members([Participant("b", own.write_ended("b")["b"])], is_established=True)
    with pytest.raises(ConnectionError, match="whether b has ended"):
        ended.check_set(7, reports, "abc")
    assert (own.refused["id"], [each["id"] for each in own.refused["participants"]]) == (7, ["a", "c"])
    with pytest.raises(ConnectionError, match="a message that differs"):
        ended.check_set(8, reports[1:], "abc")
    assert own.refused is None


def test_the_next_members_in_the_order_of_ranks_report():
    members = list("abcdef")
    assert reporters("b", members, {"b"}) == ["c", "d"]
    assert reporters("e", members, {"e", "f"}) == ["a", "b"]
    assert reporters("f", members, set(members)) == []


def test_a_report_to_a_missing_lighthouse_fails(caplog):
    caplog.set_level("INFO", "evermoe.comm.ended_members")
    with Job().reporting_ended("http://127.0.0.1:9", "b", "abc"):
        wait_until(
            lambda: all(f"the name {each} failed:" in caplog.text for each in ("b", "ended-b")),
            "both threads log the failure",
        )
