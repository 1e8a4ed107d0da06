"""Copies are spread over racks and zones where members say which they are in."""

from __future__ import annotations

import pytest

from evermoe import Membership
from evermoe.config.variables import find_membership
from evermoe.planning.placement import spread_over
from support.harness import FEWEST
from support.history import check_history, check_recovered
from support.worker import Fault

FAULT = 5
RACKS = {"a": "east/r1", "b": "east/r1", "c": "east/r2", "d": "east/r2"}


def start(job, dying, racks):
    faults = [Fault("vote", FAULT)]
    return [
        job.start(name, *(faults if name in dying else []), session={"domain": rack} if rack else {})
        for name, rack in racks.items()
    ]


def covered(each):
    """Return which copies would survive when the first member is lost."""
    events = each.events()
    lost = next(place for place, event in enumerate(events) if event["event"] == "connection_lost")
    return [event for event in events[:lost] if event["event"] == "coverage_changed"][-1]


@pytest.mark.parametrize("preset", ["auto", "gemini", "baft"])
def test_a_rack_is_lost_and_no_step_with_it(start_job, preset):
    job = start_job(4, preset=preset, join_interval=50, **FEWEST)
    workers = start(job, "cd", RACKS)
    assert [each.join() for each in workers] == [0, 0, -9, -9]
    check_history(workers)
    for survivor in workers[:2]:
        recovered = check_recovered(workers, survivor)
        assert (recovered["members"], recovered["steps_lost"], recovered["digests_mismatched"]) == (2, 0, 0)
        assert recovered["step"] >= FAULT - (preset != "auto")
        fatal = covered(survivor)["fatal"]
        assert set(fatal) == {"east/r1 + east/r2"}, "either rack may be lost"


def test_the_largest_domains_of_which_there_are_enough_are_taken():
    nodes = list("abcd")
    domains = ["z1/r1", "z1/r2", "z2/r3", "z2/r4"]
    assert spread_over(nodes, domains, 2) == ["z1", "z1", "z2", "z2"]
    assert spread_over(nodes, domains, 3) == domains
    assert spread_over(nodes, domains, 5) == nodes
    assert spread_over(nodes, ["east"] * 4, 2) == nodes, "with too few domains nodes count"
    assert spread_over(nodes, ["z1/r1", "", "z2", "z2"], 2) == nodes, "one does not say where it is"
    assert spread_over(nodes, ["z1/r1", "z1", "z2", "z2"], 2) == ["z1", "z1", "z2", "z2"], "one says its zone alone"
    assert spread_over(["a", "a", "b"], ["z1", "z2", "z2"], 2) == ["z1", "z1", "z2"], "a node is in one place"
    assert spread_over([], [], 2) == []


@pytest.mark.parametrize("domain", ["east/", "/east", "r 1", "", "a//b"])
def test_names_of_domains_are_checked(domain):
    with pytest.raises(ValueError, match=r"each part of domain \(EVERMOE_DOMAIN\), between slashes, to be a name"):
        Membership(domain=domain)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, None),
        ({"EVERMOE_DOMAIN": "east/r1"}, "east/r1"),
        ({"SLURM_TOPOLOGY_ADDR": "core.leaf2.n7", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"}, "core/leaf2"),
        ({"SLURM_TOPOLOGY_ADDR": "n7", "SLURM_TOPOLOGY_ADDR_PATTERN": "node"}, None),
    ],
)
def test_domains_come_from_the_environment(monkeypatch, variables, expected):
    for name in ("EVERMOE_DOMAIN", "SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    config = find_membership(Membership(lighthouse="http://localhost:1", job="j", members=1))
    assert config.domain == expected
