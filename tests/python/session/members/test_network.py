"""Hosts that fall silent and networks that are cut, with hosts of their own: nobody waits without end."""

import signal
import time

import pytest

from support.harness import FEWEST, SERVER, wait_until
from support.history import check_history
from support.hosts import LIGHTHOUSE, Hosts, need_namespaces
from support.worker import Fault

STEPS = 30
GATE = 8
WAITED = {"event": "waited"}
HEARTBEAT_LIMIT = 2.0
HANG_LIMIT = 60.0
"""Far longer than any test here may take to resume: only missing answers are found within `HEARTBEAT_LIMIT`."""
SLACK = 10.0
"""Seconds on top of it: 2 on this machine when it is idle, for a probe, the Lighthouse's limits and a recovery."""


@pytest.fixture
def network():
    need_namespaces()
    made = []

    def start(names):
        made.append(Hosts(SERVER, names))
        return made[-1]

    yield start
    for hosts in made:
        hosts.close()


@pytest.fixture
def start_hosts(network, start_job):
    """`start_hosts("abc")` starts a job with a worker on each of these hosts, which waits before step `GATE`."""

    def start(names, **session):
        hosts = network(names)
        job = start_job(len(names), hang_timeout=HANG_LIMIT, **session)
        job.open_gate(GATE)
        job.address = f"http://{hosts.address(LIGHTHOUSE)}:{job.address.rsplit(':', 1)[1]}"
        workers = {name: job.start(name, gated=True, steps=STEPS, network=hosts.network(name)) for name in names}
        for each in workers.values():
            each.wait_for("gate", step=GATE)
        return hosts, job, workers

    return start


def check_all_go_on(workers, since, members):
    """All of these have committed a step as that number of members, in time."""
    for each in workers:
        committed = each.wait_for("commit", members=members)
        assert committed["time"] - since < HEARTBEAT_LIMIT + SLACK


def heal(hosts, withdrawn):
    """Returns once these members have noticed, and ask the Lighthouse again."""
    hosts.heal()
    since = time.time()
    for each in withdrawn:
        wait_until(
            lambda each=each: any(e["time"] > since for e in each.events("protocol", said=WAITED)),
            f"{each.name} asks again",
        )


def by_rank(workers):
    return sorted(workers.values(), key=lambda each: each.events("share")[-1]["rank"])


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.quick("a host loses power, or is cut off from all others")
def test_host_without_power(start_hosts, rank):
    hosts, job, workers = start_hosts("abc")
    lost = by_rank(workers)[rank]
    others = [each for each in workers.values() if each is not lost]
    hosts.silence(lost.name)
    since = time.time()
    job.open_gate(STEPS)
    check_all_go_on(others, since, 2)
    assert [each.join() for each in others] == [0, 0]
    assert [event["kind"] for each in others for event in each.events("member_lost")] == ["host"] * 2
    assert {each.events("recovered")[-1]["failure"] for each in others} == {"host"}
    check_history(workers.values(), away=lost.name)


@pytest.mark.parametrize("pair, is_one_way", [((0, 1), False), ((1, 2), False), ((0, 1), True), ((2, 1), True)])
@pytest.mark.few(1)
@pytest.mark.quick("hosts cannot reach each other, the Lighthouse reaches all")
def test_cut_between_two_hosts(start_hosts, pair, is_one_way):
    hosts, job, workers = start_hosts("abc")
    one, other = (by_rank(workers)[rank] for rank in pair)
    if is_one_way:
        hosts.cut((one.name, other.name))
    else:
        hosts.split(one.name, other.name)
    since = time.time()
    job.open_gate(STEPS // 2)
    leaving = max(one, other, key=lambda each: each.name)
    staying = [each for each in workers.values() if each is not leaving]
    check_all_go_on(staying, since, 2)
    heal(hosts, [leaving])
    job.open_gate(STEPS)
    assert [each.join() for each in workers.values()] == [0, 0, 0]
    check_history(workers.values(), away=leaving.name)
    assert leaving.events("recovered")[-1]["members"] == 3


@pytest.mark.long
def test_split_that_the_lighthouse_does_not_see(start_hosts):
    hosts, job, workers = start_hosts("abcd", replication=3)
    hosts.split("ab", "cd")
    since = time.time()
    job.open_gate(STEPS // 2)
    check_all_go_on([workers["a"], workers["b"]], since, 2)
    assert not workers["c"].events("commit", members=2)
    assert not workers["d"].events("commit", members=2)
    heal(hosts, [workers["c"], workers["d"]])
    job.open_gate(STEPS)
    assert [each.join() for each in workers.values()] == [0, 0, 0, 0]
    check_history(workers.values(), away="cd")


@pytest.mark.long
def test_split_in_which_no_part_has_all_units(start_hosts):
    """It lasts longer than members wait for holders that may have ended: these live, and the network comes back."""
    limit = 1.0
    hosts, job, workers = start_hosts("abcd", replication=2, rejoin_timeout=limit, quorum_timeout=150.0, **FEWEST)
    hosts.split("ab", "cd")
    job.open_gate(STEPS)
    for name in "ab":
        lost = workers[name].wait_for("connection_lost")
        wait_until(lambda since=lost["time"]: time.time() > since + 5 * limit, "the limit is over")
        assert "their holders live: " in workers[name].log()
        assert len(workers[name].events("connection_lost")) == 1
    assert not any(each.events("commit", members=2) for each in workers.values())
    heal(hosts, [workers["c"], workers["d"]])
    assert [each.join() for each in workers.values()] == [0, 0, 0, 0]
    check_history(workers.values())
    for each in workers.values():
        recovered = each.events("recovered")[-1]
        assert (recovered["members"], recovered["steps_lost"]) == (4, 0)


@pytest.mark.long
def test_network_between_all_hosts_is_away_for_a_while(start_hosts):
    """All see the Lighthouse: one resumes alone, and the others join it again once the network is back."""
    hosts, job, workers = start_hosts("abc", replication=3)
    hosts.split("a", "b", "c")
    since = time.time()
    job.open_gate(STEPS // 2)
    check_all_go_on([workers["a"]], since, 1)
    heal(hosts, [workers["b"], workers["c"]])
    job.open_gate(STEPS)
    assert [each.join() for each in workers.values()] == [0, 0, 0]
    check_history(workers.values(), away="bc")
    assert all(each.events("recovered")[-1]["members"] == 3 for each in workers.values())


@pytest.mark.long
def test_member_that_is_reached_again_is_the_first_that_a_new_lighthouse_hears_of(start_hosts):
    """Its question was on the way while the Lighthouse was away; the others are about to report to it."""
    hosts, job, workers = start_hosts("abc", replication=3)
    others, alone = [workers["a"], workers["b"]], workers["c"]
    hosts.split("ab", "c")
    since = time.time()
    job.open_gate(STEPS // 2)
    check_all_go_on(others, since, 2)
    for each in others:
        each.wait_for("gate", step=STEPS // 2)
    job.stop_lighthouse()
    heal(hosts, [alone])
    for each in others:
        each.signal(signal.SIGSTOP)
        each.wait_until_stopped()
    restarted = time.time()
    job.restart_lighthouse()
    answers = ("quorum", "unanswered")
    wait_until(
        lambda: any(e["time"] > restarted and e["said"].get("event") in answers for e in alone.events("protocol")),
        "the Lighthouse answers the one",
    )
    for each in others:
        each.signal(signal.SIGCONT)
    job.open_gate(STEPS)
    assert [each.join() for each in workers.values()] == [0, 0, 0]
    check_history(workers.values(), away="c")
    assert not alone.events("commit", members=1)
    assert all(each.events("recovered")[-1]["members"] == 3 for each in workers.values())


@pytest.mark.long
def test_first_member_stops_while_groups_connect(start_job):
    """Its store, in which they meet, answers nobody any more, and its sockets stay open."""
    job = start_job(4, hang_timeout=HANG_LIMIT, replication=3)
    faults = {"a": [Fault("phase rebuild", nth=2, action="stop")], "b": [Fault("vote", GATE)]}
    workers = first, _, *others = job.start_all(faults, "abcd", steps=STEPS)
    first.wait_until_stopped()
    check_all_go_on(others, time.time(), 2)
    first.signal(signal.SIGCONT)
    assert [each.join() for each in others] == [0, 0]
    assert first.join() in (0, 1)  # it joins again, unless the job is over by then
    check_history(workers, away="a")
