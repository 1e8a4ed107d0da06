"""Versions of a pipeline that have the experts with the most tokens at risk, as many as a budget allows (MoEtion)."""

from __future__ import annotations

import numpy as np
import pytest

from evermoe.planning.selection import select_experts
from support.harness import PATIENCE
from support.pipelines import RANKS, Pipeline, run_undisturbed

STEPS, EXPERTS, EXPERT_BYTES = 9, 5, 73_732
COPIES = {"preset": "moetion", "replication": 2, "expert_parallel": True}
COMMON = {"attempts": "means", "steps": STEPS, "rate": 1e-3, "experts": EXPERTS, "tells_experts": True}
FEW = COMMON | {"copies": COPIES | {"remote_bytes_per_step": 3 * EXPERT_BYTES}}
ALL = COMMON | {"copies": COPIES | {"remote_bytes_per_step": RANKS * EXPERTS * EXPERT_BYTES}}
TOKENS = "_loop"
"""In the names of units that count tokens and name the versions of copies, which are others after a recovery."""


class Shape:
    """Who trains and who keeps which experts in a pipeline of four ranks.

    Args:
        peers: ranks of a stage.
    """

    def __init__(self, peers):
        self.peers, self.stages = peers, RANKS // peers

    def own(self, rank):
        """Experts of a rank: to within one as many for each of its stage's ranks."""
        place = rank % self.peers
        return range(EXPERTS * place // self.peers, EXPERTS * (place + 1) // self.peers)

    def trainer(self, unit):
        return next(rank for rank in range(RANKS) for expert in self.own(rank) if self.name(rank, expert) == unit)

    def name(self, rank, expert):
        return f"stage{rank // self.peers}.0.moe.experts.{expert}"

    def keeper(self, unit):
        """The rank after the one that trains it, on the next node."""
        return (self.trainer(unit) + 1) % RANKS

    def tokens(self, steps, step):
        """[S, E] tokens of each stage's experts in a step, as its ranks have counted them when they took it last."""
        counted = [[event["tokens"][0] for event in events if event["step"] == step][-1] for events in steps]
        return np.array(counted).reshape(self.stages, self.peers, EXPERTS).sum(1)

    def check_losses(self, ranks, reports, undisturbed):
        """The tokens that recoveries say they have lost are those that the ranks have counted themselves.

        Until the first of them as in the undisturbed run, as a rank that dies does not say all.
        """
        lost_SE, lost_before = np.zeros((self.stages, EXPERTS), np.int64), {}
        first = reports[0]["step"]
        steps = [[event for event in events if event["step"] <= first] for events in undisturbed]
        for each in ranks:
            steps[each.options.rank] += [event for event in each.events("step") if event["step"] > first]
        for report in reports:
            assert report["lost_tokens"].keys() == report["stale"].keys()
            for unit, copied in report["stale"].items():
                stage, expert = self.trainer(unit) // self.peers, int(unit.rpartition(".")[2])
                since = range(max(copied, lost_before.get(unit, 0)) + 1, report["step"] + 1)
                lost = sum(self.tokens(steps, step)[stage, expert] for step in since)
                assert report["lost_tokens"][unit] == lost, (unit, copied)
                lost_SE[stage, expert] += lost
                lost_before[unit] = report["step"]
            total = sum(self.tokens(steps, step).sum(1) for step in range(1, report["step"] + 1))
            assert report["mtl"] == pytest.approx(sum(lost_SE.sum(1) / total))
            assert report["plt"] == pytest.approx(np.mean(lost_SE.sum(1) / total))


@pytest.fixture(scope="module", params=[2, 1])
def undisturbed(request, tmp_path_factory):
    """A shape, and what ranks say at the end of a run in which nothing happens, and after each step."""
    shape = Shape(request.param)
    more = {"stages": shape.stages, "peers": shape.peers}
    pipeline = run_undisturbed(tmp_path_factory.mktemp("undisturbed"), **FEW | more)
    return shape, *pipeline


def start(start_job, shape, plans, **options):
    """Start a pipeline, and others in place of ranks that die, one after the other; by rank those of the start."""
    pipeline = Pipeline(start_job(RANKS), stages=shape.stages, peers=shape.peers, **options)
    started = [pipeline.start(rank, **plans.get(rank, {})) for rank in range(RANKS)]
    for rank in plans:
        pipeline.lose(started[rank])
        pipeline.start(rank)
    return pipeline, started


def trained(digests):
    return {name: value for name, value in digests.items() if TOKENS not in name}


def digests_after(steps, rank, step):
    """Of what a rank trained in the undisturbed run."""
    return trained(next(event["digests"] for event in steps[rank] if event["step"] == step))


@pytest.mark.few(1)
def test_versions_have_the_experts_with_the_most_tokens_at_risk_that_have_room(undisturbed):
    shape, done, steps = undisturbed
    assert {each["expert_bytes"] for each in done} == {EXPERT_BYTES}
    said = {(rank, event["step"]): event for rank, events in enumerate(steps) for event in events}
    at_risk = np.zeros((shape.stages, EXPERTS), np.int64)
    for step in range(1, STEPS):
        at_risk += shape.tokens(steps, step)
        expected = select_experts("budget", at_risk, budget_bytes=3 * EXPERT_BYTES, expert_bytes=EXPERT_BYTES)
        assert sum(map(len, expected)) == 3
        for stage in range(shape.stages):
            units = [shape.name(stage * shape.peers, expert) for expert in range(EXPERTS)]
            stored = [said[shape.keeper(unit), step + 1]["stored"].get(unit, []) for unit in units]
            found = [expert for expert in range(EXPERTS) if step in stored[expert]]
            assert found == expected[stage], (step, stage)
            at_risk[stage, found] = 0
    for (rank, step), event in said.items():
        for expert in shape.own(rank) if step > 1 else ():
            assert step - 1 in event["stored"][shape.name(rank, expert)], "of its own it has each version"
    assert [each["different"] for each in done] == [[]] * RANKS


@pytest.mark.parametrize("plan", [{"kill_in_step": 6}, {"kill_reduced": 6}, {"kill_in_copy": 6}], ids=str)
def test_a_lost_rank_loses_what_its_experts_have_learnt_since_their_copies(start_job, undisturbed, plan):
    """Where a peer has all else nobody goes back; survivors have what they train to the bit."""
    shape, _, steps = undisturbed
    pipeline, started = start(start_job, shape, {3: plan}, **FEW)
    done = pipeline.finish()
    now = [*started[:3], pipeline.ranks[-1]]
    reports = [each.events("recovered")[-1] for each in now]
    assert len({repr([each[what] for what in ("step", "stale", "lost_tokens", "plt")]) for each in reports}) == 1
    first = reports[0]
    assert (first["step"], first["steps_undone"]) in ([(6, 0)] if shape.peers > 1 else [(6, 0), (5, 1)])
    units = {shape.name(3, expert) for expert in shape.own(3)}
    assert first["stale"], "with room for 3 experts, some are older"
    assert first["stale"].keys() <= units
    for unit in units:
        kept = [event["stored"].get(unit, []) for event in steps[shape.keeper(unit)] if event["step"] <= 7]
        newest = max(version for versions in kept for version in versions if version < first["step"])
        assert first["stale"].get(unit, first["step"]) in (newest, first["step"]), "this step's copy may be complete"
    shape.check_losses(pipeline.ranks, [first], steps)
    for rank in range(3):
        assert trained(reports[rank]["digests"]) == digests_after(steps, rank, first["step"])
    rest = {name: value for name, value in digests_after(steps, 3, first["step"]).items() if name not in first["stale"]}
    assert rest.items() <= reports[3]["digests"].items()
    assert not any("other bits" in each.log() for each in now), "nobody sends again what was logged before"
    assert "went back to older copies: " in started[0].log()
    assert [each["different"] for each in done] == [[]] * RANKS


@pytest.mark.long
def test_each_loss_counts_what_came_after_the_one_before(start_job, undisturbed):
    shape, _, steps = undisturbed
    pipeline, started = start(start_job, shape, {3: {"kill_in_step": 3}, 2: {"kill_in_step": 7}}, **FEW)
    done = pipeline.finish()
    reports = started[0].events("recovered")[1:]
    shape.check_losses(pipeline.ranks, reports, steps)
    assert [bool(each["stale"]) for each in reports] == [True, True]
    assert [each["different"] for each in done] == [[]] * RANKS


@pytest.mark.long
def test_a_lost_stage_goes_back_with_all_others_who_have_their_own_experts(start_job, undisturbed):
    shape, _, steps = undisturbed
    if shape.peers == 1:
        pytest.skip("in this shape each loss is the loss of a stage")
    plans = {rank: {"kill_in_step": 6, "kill_with": rank ^ 1} for rank in (2, 3)}
    pipeline, started = start(start_job, shape, plans, **FEW | {"copies": FEW["copies"] | {"replication": 3}})
    done = pipeline.finish()
    first = started[0].events("recovered")[-1]
    assert first["step"] in (5, 6)
    assert first["stale"]
    shape.check_losses(pipeline.ranks, [first], steps)
    for rank in range(2):
        mine = started[rank].events("recovered")[-1]
        assert trained(mine["digests"]) == digests_after(steps, rank, first["step"])
    assert [each["different"] for each in done] == [[]] * RANKS


def check_undisturbed(pipeline, expected):
    """Nothing is lost; all bits are those of an undisturbed run, and tokens are counted once."""
    done = pipeline.finish()
    reports = [report for each in pipeline.ranks for report in each.events("recovered")]
    assert [(each["stale"], each["lost_tokens"], each["plt"]) for each in reports] == [({}, {}, 0.0)] * len(reports)
    assert [trained(each["digests"]) for each in done] == [trained(each["digests"]) for each in expected]
    assert [each["tokens"] for each in done] == [each["tokens"] for each in expected]
    assert [each["different"] for each in done] == [[]] * RANKS


@pytest.mark.long
def test_with_room_for_all_nothing_is_lost(start_job, undisturbed):
    """A loss goes back by a step if copies of the newest version were not complete."""
    shape, expected, _ = undisturbed
    plans = {3: {"kill_in_step": 2}, 0: {"kill_reduced": 4}, 1: {"kill_in_copy": 6}, 2: {"kill_in_step": 8}}
    pipeline, _ = start(start_job, shape, plans, **ALL)
    check_undisturbed(pipeline, expected)


@pytest.mark.few(1)
def test_a_process_whose_node_lives_loses_nothing(start_job, undisturbed):
    """Its own memory has all its experts of each version, whatever others keep."""
    shape, expected, _ = undisturbed
    pipeline = Pipeline(start_job(RANKS), stages=shape.stages, peers=shape.peers, **FEW)
    started = [pipeline.start(rank, **({"kill_in_step": 5} if rank == 3 else {})) for rank in range(RANKS)]
    started[3].process.join(PATIENCE)
    pipeline.start(3)
    check_undisturbed(pipeline, expected)


@pytest.mark.long
def test_what_a_node_costs_that_is_lost_in_a_crash_of_all_processes_is_known(start_job, undisturbed):
    """The ledger of copies is part of the state."""
    shape, _, steps = undisturbed
    pipeline = Pipeline(start_job(RANKS), stages=shape.stages, peers=shape.peers, **FEW)
    started = [pipeline.start(rank) for rank in range(RANKS)]
    started[0].wait_for("step", step=5)
    for each in started:
        each.process.kill()
    for each in started:
        each.process.join(PATIENCE)
    pipeline.lose(started[3])
    again = [pipeline.start(rank) for rank in range(RANKS)]
    done = pipeline.finish()
    reports = [each.events("recovered")[0] for each in again]
    assert 4 <= reports[0]["step"] <= 7
    assert reports[0]["stale"]
    assert len({repr([each[what] for what in ("step", "stale", "lost_tokens", "plt")]) for each in reports}) == 1
    shape.check_losses(pipeline.ranks, reports[:1], steps)
    assert [each["different"] for each in done] == [[]] * RANKS


def test_budget_is_an_eighth_until_links_are_measured_and_then_what_they_take(start_job):
    pipeline, started = start(start_job, Shape(2), {}, **COMMON | {"copies": COPIES})
    pipeline.finish()
    travelled = [
        {unit for each in started for event in each.events("step") for unit in kept_by(each, event) if step in unit[1:]}
        for step in range(STEPS)
    ]
    assert len(travelled[1]) == 1
    assert len(travelled[STEPS - 1]) == 10


def kept_by(rank, event):
    """Experts of others of which a rank's node has complete copies, each with a version."""
    own = {Shape(2).name(rank.options.rank, expert) for expert in Shape(2).own(rank.options.rank)}
    return {(unit, version) for unit, versions in event["stored"].items() if unit not in own for version in versions}
