"""Every preset in real processes: what a kill costs under it, and that the job trains to the end."""

from __future__ import annotations

import pytest

from support.harness import FEWEST
from support.history import check_history, check_recovered
from support.traffic import copied_bytes
from support.worker import Fault

PARTIAL = ["moetion", "pec"]


def options(preset, tmp_path):
    """Of a session; `moetion` without measurements, by which links within a machine carry all experts in a step."""
    more = {"profile_steps": 0} if preset == "moetion" else {}
    return {"preset": preset} | more | ({"checkpoints": str(tmp_path)} if preset in ("pec", "lazarus") else {})


def tokens_of_steps(workers, unit):
    """Tokens of an expert in each step, by version: from the counts that the workers wrote after each update."""
    layer, expert = unit.rsplit(".", 1)
    found = {}
    for each in workers:
        for event in each.events("copy", after="update"):
            found[event["version"]] = event["tokens"][layer][int(expert)]
    return found


@pytest.mark.parametrize("preset", PARTIAL)
@pytest.mark.few(1)
@pytest.mark.quick("moetion")
def test_partial_presets_lose_what_they_say(start_job, tmp_path, preset):
    """Of the next copies those are sent that holders lack: all of stale experts, and not all of the rest."""
    job = start_job(4, **options(preset, tmp_path), **FEWEST, rebalance_interval=0, join_interval=50)
    workers = job.start_all({"b": [Fault("vote", 8)]}, "abcd", steps=14, states=True)
    assert [each.join() for each in workers] == [0, -9, 0, 0]
    survivors = [workers[0], *workers[2:]]
    reports = [each.events("recovered")[-1] for each in survivors]
    assert {report["step"] for report in reports} == {8}
    assert len({repr(report["lost_tokens"]) + repr(report["plt"]) for report in reports}) == 1
    report = reports[0]
    assert report["stale"], "with one replica of each expert, few of those of the lost node are up to date"
    for unit, step in report["stale"].items():
        tokens = tokens_of_steps(workers, unit)
        lost = sum(count for version, count in tokens.items() if step < version % 2**40 <= 8)
        assert report["lost_tokens"][unit] == lost, (unit, step)
    seen = {}
    for layer, number in (("first", 6), ("second", 4)):
        units = [f"{layer}.experts.{e}" for e in range(number)]
        tokens = [tokens_of_steps(survivors, unit) for unit in units]
        every = sum(count for each in tokens for version, count in each.items() if version % 2**40 <= 8)
        seen[layer] = sum(report["lost_tokens"].get(unit, 0) for unit in units) / every
    assert report["plt"] == pytest.approx(sum(seen.values()) / 2)
    assert report["mtl"] == pytest.approx(sum(seen.values()))
    assert {each.events("done")[0]["step"] for each in survivors} == {14}
    assert {each.events("verified")[0]["digests_mismatched"] for each in survivors} == {0}
    check_history(workers)
    for survivor in survivors if preset == "moetion" else ():  # what did not lose anything keeps its copies
        plan, stale = survivor.events("holders")[-1], survivor.events("recovered")[-1]["stale"]
        missing = survivor.events("protection_planned")[-1]["missing_bytes"]
        assert 0 < copied_bytes(plan, stale) <= missing < copied_bytes(plan, plan["nodes"])


@pytest.mark.parametrize(("preset", "more"), [("moetion", {}), ("pec", {}), ("pec", {"save_interval": 50})])
@pytest.mark.few(1)
def test_a_second_loss_counts_what_came_after_the_first(start_job, tmp_path, preset, more):
    job = start_job(4, **options(preset, tmp_path), **FEWEST, rebalance_interval=0, join_interval=50, **more)
    faults = {"b": [Fault("vote", 5)], "c": [Fault("vote", 8)]}
    workers = job.start_all(faults, "abcd", steps=12)
    assert [each.join() for each in workers] == [0, -9, -9, 0]
    check_history(workers)
    survivors = workers[::3]
    for each in survivors:
        first, second = each.events("recovered")[1:]
        assert (first["step"], second["step"]) == (5, 8)
        assert second["stale"]
        for unit, copied in second["stale"].items():
            since = max(copied, 5 if unit in first["stale"] else 0)
            tokens = tokens_of_steps(workers, unit)
            lost = sum(count for version, count in tokens.items() if since < version % 2**40 <= 8)
            assert second["lost_tokens"][unit] == lost, (unit, since)
        portions = []
        for layer, number in (("first", 6), ("second", 4)):
            units = [f"{layer}.experts.{e}" for e in range(number)]
            tokens = [tokens_of_steps(survivors, unit) for unit in units]
            seen = sum(count for of_unit in tokens for version, count in of_unit.items() if version % 2**40 <= 8)
            lost = sum(report["lost_tokens"].get(unit, 0) for report in (first, second) for unit in units)
            portions.append(lost / seen)
        assert second["plt"] == pytest.approx(sum(portions) / 2), "of both losses"
    if more:
        assert {0} == {*first["stale"].values(), *second["stale"].values()}
        assert set(first["stale"]) & set(second["stale"])


@pytest.mark.parametrize(
    ("point", "step", "preset"),
    [
        pytest.param(point, step, preset, marks=() if preset == "auto" or point == "copy" else pytest.mark.long)
        for preset in ("auto", "gemini", "baft", *PARTIAL)
        for point, step in (("update", 0), ("copy", 1), ("vote", 1))
    ],
)
@pytest.mark.few(2)
def test_copies_of_the_start_are_as_good_as_any(start_job, tmp_path, point, step, preset):
    """No member that saw them made takes them for the copies of a process that has just come."""
    job = start_job(3, **options(preset, tmp_path), **FEWEST)
    workers = job.start_all({"b": [Fault(point, step)]}, steps=6)
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    for each in workers[::2]:
        recovered = each.events("recovered")[-1]
        assert recovered["steps_lost"] == recovered["digests_mismatched"] == 0
        assert preset in PARTIAL or not recovered["stale"]


def test_units_that_a_budget_leaves_out_never_leave_a_gap(start_job):
    job = start_job(2, preset="moetion", remote_bytes_per_step=30_000, **FEWEST)
    workers = job.start_all({}, "ab", optimizer="sgd-fused", steps=16)
    assert [each.join() for each in workers] == [0, 0]
    check_history(workers)
    for each in workers:
        assert "waits for its full state" not in each.log()
        assert len(each.events("gradients_logged")) > 10


def test_lazarus_loses_nothing_when_a_node_with_several_ranks_dies(start_job):
    """Replicas are placed by node and dealt to its ranks: each expert is on the other node, too."""
    job = start_job(3, preset="lazarus")
    node = {"a": "x", "b": "y", "c": "y"}
    workers = [job.start(name, session={"node": on}, steps=60) for name, on in node.items()]
    workers[2].wait_for("share", step=5)
    for each in workers[1:]:
        each.process.kill()
    assert [each.join() for each in workers] == [0, -9, -9]
    recovered = check_recovered(workers, workers[0])
    assert (recovered["steps_lost"], recovered["lost_units"]) == (0, [])
