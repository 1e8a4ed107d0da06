"""Shares that members save under `pec`: about equal bytes, parts of what all have, and all of what one owns."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from evermoe.checkpoint.checkpoint_folder import find_manifests
from evermoe.checkpoint.manifest import SAVE
from evermoe.planning.save_shares import ALIGNMENT
from support.harness import FEWEST
from support.history import check_history
from support.optimizers import make_optimizer
from support.worker import Fault, Model

FAULT = 6


def sizes():
    """Bytes of each unit under `pec`, and the layout."""
    from evermoe.state.training_state import TrainingState

    model = Model()
    catalog = TrainingState(model, make_optimizer("adamw", model), has_marks=True).catalog
    return dict(catalog.sizes()), catalog.layout


def saved_bytes(folder):
    """By version, what each rank has saved of it: bytes of experts, and of all."""
    nbytes, layout = sizes()
    found = {}
    for manifest in find_manifests(folder, layout, (SAVE,)):
        experts, every = Counter(), Counter()
        for row in manifest.rows:
            if row.version == manifest.version:
                rank = int(row.file.partition("-")[2].partition(".")[0])
                size = nbytes[row.unit] if row.part is None else row.part.end - row.part.start
                every[rank] += size
                experts[rank] += size * ("experts" in row.unit)
        found[manifest.version] = {rank: (experts[rank], every[rank]) for rank in every}
    return found


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.few(1)
def test_nobody_saves_more_than_its_share(start_job, tmp_path, each):
    job = start_job(3, preset="pec", checkpoints=str(tmp_path), experts_per_save=each, **FEWEST)
    workers = job.start_all({}, steps=12)
    assert [worker.join() for worker in workers] == [0, 0, 0]
    check_history(workers)
    complete = saved_bytes(tmp_path)
    assert complete
    for found in complete.values():
        assert len(found) == 3
        every = sum(total for _, total in found.values())
        level = max(-(-every // 3), *(experts for experts, _ in found.values()))
        assert max(total for _, total in found.values()) < level + ALIGNMENT, found


@pytest.mark.parametrize("point", ["vote", "update", "copy"])
@pytest.mark.few(1)
def test_what_a_lost_owner_had_comes_from_the_store(start_job, tmp_path, point):
    """All go back to the newest step of which all that is no expert is saved, and every owner saves its own."""
    job = start_job(3, preset="pec", shard_optimizer=True, checkpoints=str(tmp_path), **FEWEST)
    workers = job.start_all({"c": [Fault(point, FAULT)]}, steps=14)
    assert [each.join() for each in workers] == [0, 0, -9]
    check_history(workers, undone=True)
    known = defaultdict(dict)
    for each in workers:
        for event in each.events("copy", after="update"):
            known[event["step"]] |= {unit: v for unit, v in event["digests"].items() if "experts" not in unit}
    for each in workers[:2]:
        recovered = each.events("recovered")[-1]
        assert recovered["members"] == 2
        assert not recovered["lost_units"]
        assert FAULT - 4 <= recovered["step"] <= FAULT + 1
        assert {each.events("verified")[0]["digests_mismatched"]} == {0}
    after = [event for event in workers[0].events("copy", after="phase") if event["time"] < recovered["time"]][-1]
    dense = {unit: value for unit, value in after["digests"].items() if "experts" not in unit and unit != "session"}
    assert dense
    assert {unit: known[recovered["step"]][unit] for unit in dense} == dense
    assert find_manifests(tmp_path, sizes()[1], (SAVE,))[-1].units.keys() == sizes()[0].keys()
