"""Members that are slower than the others: all name them, once; metrics and the table show them."""

import logging
import time
from datetime import timedelta
from itertools import chain
from types import SimpleNamespace

import pytest

from evermoe import ElasticSampler
from evermoe.comm.own_time import PARTS, OwnTime
from evermoe.comm.transport import Transport
from evermoe.events import Measured
from evermoe.observe import Metrics
from evermoe.planning.slow_hosts import MIN_FACTOR
from evermoe.planning.stragglers import STEPS
from evermoe.session.proportions import LEAST, Proportions
from evermoe.session.slow_links import STEADY, SlowLinks
from evermoe.session.slow_members import SlowMembers
from support.harness import PATIENCE, wait_until
from support.history import check_history
from support.worker import Fault

EVICTED = 120.0
"""Seconds for 200 steps of a job."""
CONNECTED = 48
"""The step by which all connections exist."""
SLOW = 0.3
"""Seconds by which a slow member takes longer: many times as long as the others, also on a busy machine."""


@pytest.mark.quick("a worker is slower than the others")
def test_a_slow_member_is_named_by_all(start_job):
    job = start_job()
    workers = [job.start(name, steps=10_000, slow=SLOW if name == "b" else 0.0) for name in "abc"]
    for each in workers:
        named = each.wait_for("slow_member")
        assert named["member"].startswith("b-")
        assert (named["node"], named["part"]) == ("b", "compute")
        assert named["seconds"] > SLOW > named["usual"]
        assert named["factor"] > 2
    (rank,) = {each.events("slow_member")[0]["rank"] for each in workers}
    assert rank == workers[1].events("share")[-1]["rank"]
    step = workers[1].events("measured")[-1]["step"]
    assert workers[1].wait_for("measured", slow="compute")["own_seconds"] > SLOW
    workers[0].wait_for("commit", step=step + 2 * STEPS)
    assert all(len(each.events("slow_member")) == 1 for each in workers), "it is named once"
    assert {each["slow"] for each in workers[0].events("measured")} == {""}
    logs = [each.log().count(f"on b (rank {rank}) is slow: its own work takes") for each in workers]
    assert logs[1] == 1
    assert sum(logs) == 2, "by itself, and by one of the others"


def test_a_member_that_reads_slowly_is_named_with_its_loader(start_job):
    """In each step of one member: `SlowLoader` names it as well, but only to itself."""
    job = start_job()
    faults = {"c": [Fault("read", None, "slow", nth, seconds=SLOW) for nth in range(1, 200)]}
    workers = job.start_all(faults, steps=10_000)
    for each in workers:
        assert each.wait_for("slow_member")["part"] == "loader"


def test_a_member_with_a_slow_network_is_named_by_all(start_job):
    job = start_job()
    workers = job.start_all({"b": [Fault("forward", CONNECTED, "throttle")]}, steps=10_000)
    for each in workers:
        named = each.wait_for("slow_member", part="network")
        assert named["node"] == "b"
        assert named["step"] > CONNECTED
        assert named["factor"] >= MIN_FACTOR
    assert workers[1].wait_for("measured", slow="network")
    assert sum(each.log().count("on b (rank") for each in workers) == 2, "by itself, and by one of the others"


def test_a_round_of_messages_ends_when_all_have_arrived():
    """Also where the vote after it finds one under way; and a recovery without new connections leaves it under way."""
    links = connected_links(3)
    try:
        for step in range(STEADY):
            vote(links, [each.numbers() for each in links], step)
        wait_until(lambda: all(any(each.numbers()) for each in links), "the messages have arrived")
        numbers = [each.numbers() for each in links]
        sources = [[bool(seconds) for seconds in row].index(True) for row in numbers]
        assert sources == [1, 2, 0], "two places away"
        for each in links:
            each.restart()
        vote(links, [*numbers[:2], [0.0] * 3], STEADY)
        assert [len(each._rounds) for each in links] == [0, 0, 0], "one has not reported its message yet"
        vote(links, numbers, STEADY + 1)
        assert [len(each._rounds) for each in links] == [1, 1, 1]
    finally:
        for each in links:
            each._membership.transport.close()


def connected_links(size):
    transports = [Transport("127.0.0.1", "127.0.0.1") for _ in range(size)]
    limit = timedelta(seconds=PATIENCE)
    for rank, each in enumerate(transports):
        each.connect(1, rank, [other.address for other in transports], limit, limit)
    members, store = {str(rank): {} for rank in range(size)}, object()
    links = []
    for rank, transport in enumerate(transports):
        everyone = SimpleNamespace(rank=rank)
        fields = {"id": str(rank), "members": members, "nodes": list(members), "store": store}
        links.append(SlowLinks(SimpleNamespace(everyone=everyone, transport=transport, **fields), None))
        links[-1].restart()
    return links


def vote(links, numbers, step):
    """All get the sums, with a number of another part of the vote before them."""
    for each in links:
        assert each.take_step(step, [7.0, *map(sum, zip(*numbers, strict=True))]) == [7.0]


def test_a_slow_member_leaves_if_it_shall(start_job):
    """No step is repeated, its process ends as on a notice, and the others continue."""
    job = start_job(on_slow="evict")
    a, b, c = [job.start(name, steps=200, slow=SLOW if name == "b" else 0.0) for name in "abc"]
    assert [each.join(EVICTED) for each in (b, a, c)] == [143, 0, 0]
    named = a.wait_for("slow_member")["step"]
    left = a.wait_for("commit", members=2)["step"]
    assert named < left <= named + 3
    assert [each["kind"] for each in a.events("member_lost")] == ["left"]
    assert a.events("recovered")[-1]["steps_undone"] == 0
    assert "It leaves the job (on_slow)" in b.log()
    check_history([a, b, c], away="b")


def test_a_slow_member_gets_fewer_samples_if_batches_shift(start_job):
    """All samples are used once, whatever the parts are; with a new member all are even again."""
    job = start_job(on_slow="shift", join_interval=1)
    a, b, _ = workers = [job.start(name, steps=100, slow_sample=0.05 if name == "b" else 0.0) for name in "abc"]
    a.wait_for("slow_member")
    assert [each.join(EVICTED) for each in workers] == [0, 0, 0]
    for each in workers:
        first, last = each.events("share")[0]["indices"], each.events("share")[-1]["indices"]
        assert len(first) == 4
        assert (len(last) < 4) if each is b else (len(last) > 4)
    assert "of an even part of each batch from now on" in b.log()
    check_history(workers)


def test_parts_follow_the_speed_of_a_member(caplog):
    """They shrink until all take as long, and grow again when it is faster; a recovery makes them even."""
    job = Job(rank=2, policy="shift")
    speed = 2.0

    def run(steps):
        for _ in range(steps):
            parts = job.sampler.proportions or [1, 1, 1]
            even = sum(parts) / 3
            job.add(1, seconds=[0.1 * part / even * (speed if rank == 2 else 1) for rank, part in enumerate(parts)])

    with caplog.at_level(logging.WARNING, "evermoe"):
        run(8 * STEPS)
        assert job.sampler.proportions[:2] == [1, 1]
        assert 0.4 < job.sampler.proportions[2] < 0.6
        speed = 1.0
        run(8 * STEPS)
        assert job.sampler.proportions is None
    assert "c-1 gets 50 % of an even part of each batch from now on" in caplog.text
    speed = 100.0
    run(8 * STEPS)
    assert job.sampler.proportions[2] == LEAST
    assert job.slow.slow
    job.slow.restart()
    assert job.sampler.proportions is None
    assert not job.slow.slow, "a newcomer would not know it"


def test_batches_cannot_shift_without_a_sampler_that_divides_them():
    with pytest.raises(ValueError, match=r"on_slow='shift' needs a sampler with `proportions`.*got a object"):
        Proportions(object())


@pytest.mark.parametrize(("factor", "leaves"), [(1.4, False), (1.6, True)])
def test_it_leaves_only_if_the_others_are_faster_without_it(factor, leaves):
    """Of three members: two do in 1.5 times the time what three do."""
    job = Job(rank=2, policy="evict")
    job.add(STEPS + 1, compute=0.1 * (factor - 1))
    assert job.parts == ["compute"]
    assert job.slow.must_leave == leaves


class Job:
    """Times of three members, whose result rank 0 sees."""

    def __init__(self, rank=0, policy="warn"):
        ids = {name: {} for name in ("a-1", "b-1", "c-1")}
        group = SimpleNamespace(rank=rank)
        self.membership = SimpleNamespace(
            members=ids,
            nodes=list("abc"),
            num_trainers=3,
            everyone=group,
            id=list(ids)[rank],
            failure_detector=SimpleNamespace(activity=SimpleNamespace(own_time=OwnTime())),
        )
        self.seen, self.step = [], 0
        self.sampler = ElasticSampler(16, 4)
        self.slow = SlowMembers(self.membership, None, self.seen.append, policy, self.sampler, trains=False)

    def add(self, steps, seconds=(0.1, 0.1, 0.1), **parts_of_c):
        for _ in range(steps):
            rows = [[each, 0.0, 0.0, 0.0] for each in seconds]
            for part, more in parts_of_c.items():
                rows[2][PARTS.index(part)] += more
            self.slow.add_step(self.step, [*chain(*rows), *[0.0] * len(PARTS)])  # the last of a replica node
            self.step += 1

    @property
    def parts(self):
        return [event.part for event in self.seen]


@pytest.mark.parametrize("part", PARTS)
def test_the_part_with_the_difference(part):
    job = Job()
    job.add(STEPS + 1, **{part: 0.06})
    assert job.parts == [part]


def test_a_member_without_a_processor_must_be_slower_to_be_named():
    job = Job()
    job.add(4 * STEPS, processor=0.04)
    assert job.parts == []
    job.add(2 * STEPS, compute=0.04)
    assert job.parts == ["compute"]


def test_a_member_that_was_slow_is_named_again_if_it_is_again(caplog):
    job = Job()
    with caplog.at_level(logging.WARNING, "evermoe"):
        job.add(3 * STEPS, compute=0.1)
        job.add(2 * STEPS)
        assert job.slow.slow == {}
        job.add(2 * STEPS, loader=0.1)
    assert job.parts == ["compute", "loader"]
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    assert said == ["c-1 on c (rank 2) is slow", "c-1 is as fast as the others again", "c-1 on c (rank 2) is slow"]


def test_a_recovery_begins_to_compare_again_and_forgets_who_is_gone():
    job = Job(rank=2)
    job.add(STEPS, compute=0.1)
    job.slow.restart()
    job.add(2, compute=0.1)
    assert job.parts == []
    job.add(STEPS, compute=0.1)
    assert job.slow.own_part == "compute"
    del job.membership.members["c-1"]
    job.slow.restart()
    assert job.slow.own_part == ""


def test_own_time_has_no_waits_for_others():
    own, began = OwnTime(), time.monotonic()
    own.restart()
    time.sleep(0.05)
    own.begin_wait()
    time.sleep(0.2)
    own.end_wait()
    with own.part("checkpoint"):
        own.begin_wait()
        time.sleep(0.2)
        own.end_wait()
        time.sleep(0.1)
    found = dict(zip(PARTS, own.seconds(), strict=True))
    assert sum(found.values()) <= time.monotonic() - began - 0.4, "without both waits"
    assert found["compute"] >= 0.04
    assert found["checkpoint"] >= 0.09
    waited = own.latest_wait
    assert waited >= 0.2
    own.restart()
    assert sum(own.seconds()) < waited, "the next step has none of it"


def test_metrics():
    metrics = Metrics()
    metrics(Measured(7, 0.5, 8, None, None, {}, {}, own_seconds=0.25, slow="compute"))
    value = metrics.registry.get_sample_value
    assert value("evermoe_recent_own_seconds") == 0.25
    assert value("evermoe_slow", {"part": "compute"}) == 1
    metrics(Measured(8, 0.5, 8, None, None, {}, {}, own_seconds=0.75))
    assert value("evermoe_recent_own_seconds") == 0.5
    assert value("evermoe_slow", {"part": "compute"}) is None
