"""Every preset in real processes: what a kill costs under it, and that the job goes on to the end."""

from __future__ import annotations

import pytest

from history import check_history, check_recovered
from worker import Fault

PARTIAL = ["moetion", "pec"]
FEWEST = {"slots": 1}
"""No expert has a second active replica if there are as many slots without."""


def options(preset, tmp_path):
    return {"preset": preset} | ({"checkpoint_dir": str(tmp_path)} if preset in ("pec", "lazarus") else {})


def tokens_of_steps(workers, unit):
    """Tokens of an expert in each step, by version: from the counts that the workers wrote after each update."""
    layer, expert = unit.rsplit(".experts.", 1)
    found = {}
    for each in workers:
        for event in each.events("copy", after="update"):
            found[event["version"]] = event["tokens"][layer][int(expert)]
    return found


@pytest.mark.parametrize("preset", PARTIAL)
def test_partial_presets_lose_what_they_say(start_job, tmp_path, preset):
    job = start_job(4, **options(preset, tmp_path), **FEWEST, rebalance_every=0, join_every=50)
    workers = job.start_all({"b": [Fault("vote", 8)]}, "abcd", steps=14)
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
        every = sum(
            sum(tokens_of_steps(survivors, unit).get(v, 0) for v in tokens_of_steps(survivors, unit) if v % 2**40 <= 8)
            for unit in units
        )
        seen[layer] = sum(report["lost_tokens"].get(unit, 0) for unit in units) / every
    assert report["plt"] == pytest.approx(sum(seen.values()) / 2)
    assert {each.events("done")[0]["step"] for each in survivors} == {14}
    check_history(workers)


def test_lazarus_loses_nothing_while_a_replica_lives(start_job, tmp_path):
    job = start_job(3, **options("lazarus", tmp_path))
    workers = job.start_all({"b": [Fault("vote", 5)]})
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    for survivor in workers[::2]:
        recovered = check_recovered(workers, survivor)
        assert (recovered["step"], recovered["steps_lost"], recovered["lost_units"]) == (5, 0, [])
