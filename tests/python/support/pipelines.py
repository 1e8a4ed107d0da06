"""Jobs of pipeline ranks, each a real process."""

from __future__ import annotations

import functools
import os
import shutil

from evermoe.state.version import step_of
from support import pipeline_worker, replay_faults
from support.harness import PATIENCE, Job, Worker
from support.pipeline_worker import MICROBATCHES, PEERS, ROWS, STAGES, Options

RANKS = STAGES * PEERS
BORDER_BYTES = MICROBATCHES * ROWS * Options.width * 4
"""Activations or gradients of a run of a schedule at one border."""
PRESETS = {"baft": {"preset": "baft"}, "moetion": {"preset": "moetion", "replication": 3}}


class Rank(Worker):
    """One rank; what it writes is read as `Worker` does."""

    def __init__(self, options, environment):
        self.main = functools.partial(_run, environment=environment)
        super().__init__(options)


def _run(options, environment):
    os.environ |= environment
    if replay_faults.FAULT in environment:
        replay_faults.install(environment[replay_faults.FAULT])
    pipeline_worker.main(options)


class Pipeline:
    """A job of pipeline ranks, each on a node of its own, or with others on one."""

    def __init__(self, job: Job, ranks_per_node=1, environment=lambda rank: {}, **options):
        self.job, self.ranks_per_node, self.options = job, ranks_per_node, options
        self.environment = environment
        self.ranks = []

    def node(self, rank):
        return f"n{rank // self.ranks_per_node}"

    def start(self, rank, **options):
        copies = {"job": self.job.name, "memory_dir": str(self.job.memory), "node": self.node(rank)}
        copies |= {"hang_timeout": 10.0, "quorum_timeout": 30.0, "copy_buffer_bytes": 1 << 14}
        everything = self.options | options
        copies |= everything.pop("copies", {})
        name = f"r{rank}-{len(self.ranks)}"
        made = Options(name, str(self.job.folder), self.job.address, rank, copies=copies, **everything)
        self.ranks.append(Rank(made, self.environment(rank)))
        self.job.workers.append(self.ranks[-1])
        return self.ranks[-1]

    def lose(self, each):
        """It is dead, and the memory of its node with it."""
        each.process.join(PATIENCE)
        assert each.process.exitcode == -9, each.log()
        shutil.rmtree(self.job.node_memory(f"n{each.options.rank}"))

    def lose_each(self, last, pair, *, begun):
        """Lose each rank, and put another process in its place; then two at once, when they have begun a step.

        Args:
            last: processes, by rank, each of which kills itself; they are replaced in the list.
            pair: the ranks that are lost together.
            begun: number of that step.
        """
        for rank in range(len(last)):
            self.lose(last[rank])
            last[rank] = self.start(rank, kill_begun=begun if rank in pair else None)
        for rank in pair:
            self.lose(last[rank])
        for rank in pair:
            last[rank] = self.start(rank)

    def finish(self):
        """By rank, what its last process said at the end."""
        alive = [each for each in self.ranks if each.process.exitcode != -9]
        done = {}
        for each in alive:
            done[each.options.rank] = each.wait_for("done", limit=2 * PATIENCE)
        for each in alive:
            assert each.join() == 0, each.log()
        return [done[rank] for rank in range(RANKS)]

    def finish_as(self, uninterrupted):
        """With the same losses, in steps that are repeated, too, and the same state."""
        done = self.finish()
        losses, digests = uninterrupted
        assert {key: set(values) for key, values in self.losses().items()} == {k: set(v) for k, v in losses.items()}
        assert [each["digests"] for each in done] == digests

    def losses(self):
        """By step, what the ranks of the last stage say."""
        found = {}
        for each in self.ranks:
            if each.options.rank >= RANKS - PEERS:
                for event in each.events("step"):
                    found.setdefault((each.options.rank, event["step"]), []).append(event["loss"])
        return found


def run_undisturbed(folder, **options):
    """Reports of ranks at the end of a run without failures, and after each step."""
    job = Job(folder, RANKS)
    try:
        pipeline = Pipeline(job, **options)
        for rank in range(RANKS):
            pipeline.start(rank)
        return pipeline.finish(), [each.events("step") for each in pipeline.ranks]
    finally:
        job.close()


def has_voted(worker, step):
    """Whether a rank has its own copies of this number of steps, and those that it keeps, and votes on the next one."""
    commands = [each for event in worker.events("protocol") for each in event["commands"]]
    return any(each["command"] == "vote" and step_of(each["version"]) == step for each in commands)


def losses(steps, what="loss"):
    """After each step, as the ranks say."""
    return [{event["step"]: event[what] for event in events} for events in steps]


def check_same_bits(pipeline, undisturbed):
    """Each step that a process has taken has the undisturbed run's loss, and the end its state; what the ranks say."""
    way, expected, steps = undisturbed
    done = pipeline.finish()
    exact = losses(steps)
    for each in pipeline.ranks:
        for event in each.events("step"):
            assert event["loss"] == exact[each.options.rank][event["step"]], (way, each.name, event["step"])
    assert [each["digests"] for each in done] == [each["digests"] for each in expected]
    assert [each["different"] for each in done] == [[]] * RANKS
    return done
