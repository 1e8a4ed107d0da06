"""A pipeline of 2 stages with 2 data-parallel ranks each: real processes, of which each is killed in turn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import pipeline_worker
from harness import PATIENCE, SERVER, Job, Worker
from pipeline_worker import PEERS, STAGES, Options

RANKS = STAGES * PEERS
PRESETS = {"baft": {"preset": "baft"}, "moetion": {"preset": "moetion", "copies": 3}}


class Rank(Worker):
    """One rank; what it writes is read as `Worker` does."""

    def __init__(self, options):
        self.options, self.name = options, options.name
        self.process = SERVER.Process(target=pipeline_worker.main, args=(options,), daemon=True)
        self.process.start()
        self.pid = self.process.pid


class Pipeline:
    """A job of pipeline ranks, each on a node of its own."""

    def __init__(self, job: Job, **options):
        self.job, self.options = job, options
        self.ranks = []

    def start(self, rank, **options):
        copies = {"job": self.job.name, "memory_dir": str(self.job.memory), "node": f"n{rank}"}
        copies |= {"hang_limit": 10.0, "agree_limit": 30.0, "copy_buffer_bytes": 1 << 14}
        everything = self.options | options
        copies |= everything.pop("copies", {})
        name = f"r{rank}-{len(self.ranks)}"
        made = Options(name, str(self.job.folder), self.job.address, rank, copies=copies, **everything)
        self.ranks.append(Rank(made))
        self.job.workers.append(self.ranks[-1])
        return self.ranks[-1]

    def lose(self, each):
        """It is dead, and the memory of its node with it."""
        each.process.join(PATIENCE)
        assert each.process.exitcode == -9, each.log()
        shutil.rmtree(self.job.node_memory(f"n{each.options.rank}"))

    def finish(self):
        """By rank, what its last process said at the end."""
        alive = [each for each in self.ranks if each.process.exitcode != -9]
        done = {}
        for each in alive:
            done[each.options.rank] = each.wait_for("done", limit=2 * PATIENCE)
        for each in alive:
            assert each.join() == 0, each.log()
        return [done[rank] for rank in range(RANKS)]

    def losses(self):
        """By step, what the ranks of the last stage say."""
        found = {}
        for each in self.ranks:
            if each.options.rank >= RANKS - PEERS:
                for event in each.events("step"):
                    found.setdefault((each.options.rank, event["step"]), []).append(event["loss"])
        return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Losses and final digests of a run in which nothing happens."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    job = Job(folder, RANKS)
    try:
        pipeline = Pipeline(job, copies=PRESETS["baft"])
        for rank in range(RANKS):
            pipeline.start(rank)
        done = pipeline.finish()
        return pipeline.losses(), [each["digests"] for each in done]
    finally:
        job.close()


@pytest.mark.parametrize("victim", range(RANKS))
@pytest.mark.parametrize("preset", PRESETS)
def test_each_rank_dies_in_a_step_and_its_successor_in_a_copy(start_job, uninterrupted, preset, victim):
    losses, digests = uninterrupted
    pipeline = Pipeline(start_job(RANKS), copies=PRESETS[preset])
    started = [pipeline.start(rank, kill_in_step=3 if rank == victim else None) for rank in range(RANKS)]
    pipeline.lose(started[victim])
    second = pipeline.start(victim, kill_in_copy=7)
    pipeline.lose(second)
    third = pipeline.start(victim)
    done = pipeline.finish()

    again = third.events("recovered")[0]["step"]
    assert again in (6, 7)  # the vote on step 6 had passed where it died, so a survivor knows of it, too, if it got there
    for each in started:
        if each is not started[victim]:
            assert [event["step"] for event in each.events("recovered")] == [0, 3, again]
    assert second.events("recovered")[0]["step"] == 3
    for newcomer in (second, third):
        assert newcomer.events("recovered")[0]["fetched"] == len(done[victim]["digests"])

    found = pipeline.losses()
    assert found.keys() == losses.keys()
    for key, values in found.items():
        assert values == pytest.approx(losses[key] * len(values), abs=1e-6)
    for each, expected in zip(done, digests, strict=True):
        assert each["different"] == []
        assert each["digests"] == expected
    assert done[0]["compared"] == 4 * STAGES * len(digests[0])  # both peers' and two copies
    for stage in range(STAGES):
        assert done[stage * PEERS]["digests"] == done[stage * PEERS + 1]["digests"]
