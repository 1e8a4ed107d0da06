"""Islands as real processes: an island joins once it is complete, and ends when it loses a process."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from evermoe import _native
from evermoe.session.rendezvous import Rendezvous
from support.harness import wait_until
from support.island_worker import start_process

STEPS = 18


def waits_for_its_island(worker):
    """Whether it has asked, and was left out."""
    return any(each.get("why") == "island" for event in worker.events("protocol") for each in event["commands"])


def test_an_island_takes_part_completely_or_not_at_all(start_job):
    job = start_job(4)
    job.open_gate(3)
    start = partial(start_process, job, size=2, members=4, steps=STEPS)
    a0, a1, b1 = start("a", 0), start("a", 1), start("b", 1)
    wait_until(lambda: waits_for_its_island(b1), "an incomplete island waits")
    assert not any(each.events("recovered") for each in (a0, a1, b1))
    b0 = start("b", 0)
    for each in (a0, a1, b0, b1):
        each.wait_for("gate", step=3)
        assert each.events("recovered")[0]["islands"] == ["a", "a", "b", "b"]
    assert [each.events("recovered")[0]["place"] for each in (a0, a1, b0, b1)] == [[rank, 2] for rank in range(4)]

    b1.process.kill()
    job.open_gate(6)
    assert b0.join() == 1
    failed = b0.events("failed")[0]
    assert failed["error"] == "IslandLost"
    assert "of the 2 processes of this worker's island, 1 are left" in failed["why"]
    for each in (a0, a1):
        each.wait_for("gate", step=6)
        assert [found["islands"] for found in each.events("recovered")] == [["a", "a", "b", "b"], ["a", "a"]]

    c0 = start("c", 0)
    wait_until(lambda: waits_for_its_island(c0), "an incomplete island waits")
    job.open_gate(7)
    for each in (a0, a1):
        each.wait_for("gate", step=7)
        assert len(each.events("recovered")) == 2
    c1 = start("c", 1)
    job.take_in(c0, c1, until=STEPS)
    assert [each.join() for each in (a0, a1, c0, c1)] == [0, 0, 0, 0]
    for each in (a0, a1):
        assert [event["step"] for event in each.events("committed")] == list(range(STEPS))
    joined = c0.events("recovered")[0]["step"]
    for position, both in enumerate([(a0, c0), (a1, c1)]):
        sums = [1.0 + position if 3 <= step < joined else 2.0 + 2 * position for step in range(STEPS)]
        assert [each.events("done")[0]["sums"] for each in both] == [sums, sums]


def test_a_member_asks_again_while_a_process_of_its_island_is_slow_to_ask():
    flags = ("is_spare", "is_fixed", "allows_solo_resume", "needs_majority")
    numbers = {"members": 2, "join_interval": 1, "rebalance_interval": 0, "generation": 0}
    machine = _native.Protocol({"id": "a", "trains": True} | dict.fromkeys(flags, False) | numbers)
    membership = SimpleNamespace(
        trainer_group=SimpleNamespace(broken=None),
        members={},
        requests=SimpleNamespace(
            begin_agreement=lambda is_established: None, request_members=lambda standing, group, is_intact: (1, [])
        ),
        groups=SimpleNamespace(watch=SimpleNamespace(awaits_slow=lambda named: True)),
    )
    rendezvous = Rendezvous(SimpleNamespace(agreeing=lambda: None), membership)
    (ask,) = machine.handle({"event": "look", "until": 1})
    answer = rendezvous.ask(ask["standing"], ask["is_intact"])
    assert [each["command"] for each in machine.handle(answer)] == ["drop", "ask"]
