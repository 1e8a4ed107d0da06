"""Replicas of experts on several ranks of a stage, in real processes, and where they are placed."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import evermoe
from evermoe.comm.group import Group
from evermoe.config.copies import CopyConfig
from evermoe.copies.snapshot.bundles import Bundle
from evermoe.copies.snapshot.version_division import VersionDivision
from evermoe.errors import PeerLost
from evermoe.pipeline.border_log import BorderLog
from evermoe.pipeline.chosen_experts import ChosenExperts
from evermoe.pipeline.pipeline_config import PipelineConfig
from evermoe.pipeline.stage_placement import StagePlacement
from evermoe.pipeline.stages import StageRank, StageState, stage_bundles, stage_primaries
from evermoe.presets import PipelineBaft, PipelineMoetion
from support.harness import PATIENCE
from support.pipelines import PRESETS, RANKS, Pipeline, check_same_bits, losses, run_undisturbed

STEPS, EXPERTS, MOVES = 9, 5, 4
PLACEMENT = evermoe.Placement(expert_slots=3, rebalance_interval=MOVES)
COMMON = {"attempts": "means", "dropout": 0.1, "steps": STEPS, "rate": 1e-3, "experts": EXPERTS, "shift": 2.0}
REPLICAS = {"expert_parallel": PLACEMENT}
WAYS = {
    "baft": COMMON | {"parts": 2, "copies": PRESETS["baft"] | REPLICAS | {"max_grad_norm": 0.5}},
    "moetion": COMMON | {"copies": PRESETS["moetion"] | REPLICAS | {"replication": 2, "expert_selection": "all"}},
}


def experts_of(done):
    """Experts that a rank trains at the end."""
    return {name for name in done["digests"] if "experts" in name}


@pytest.fixture(scope="module", params=WAYS)
def undisturbed(request, tmp_path_factory):
    """A way, and the end of a run in it."""
    return request.param, *run_undisturbed(tmp_path_factory.mktemp("undisturbed"), **WAYS[request.param])


@pytest.mark.few(1)
def test_replicas_by_load_train_as_one_rank_with_all_experts_would(undisturbed, tmp_path):
    way, done, steps = undisturbed
    alone = {"expert_parallel": False}
    _, expected = run_undisturbed(tmp_path, **WAYS[way] | {"copies": WAYS[way]["copies"] | alone})
    for what, limit in (("loss", 1e-5), ("squares", 1e-4)):
        for found, exact in zip(losses(steps, what), losses(expected, what), strict=True):
            assert found == pytest.approx(exact, rel=limit)
    for first in (0, 2):
        mine, others = experts_of(done[first]), experts_of(done[first + 1])
        assert len(mine | others) == EXPERTS
        assert all(done[first]["digests"][name] == done[first + 1]["digests"][name] for name in mine & others)
    assert [each["different"] for each in done] == [[]] * RANKS


PLANS = [{"kill_in_step": MOVES}, {"kill_reduced": 3}, {"kill_in_copy": MOVES + 2}]


def assert_moved(pipeline):
    """Experts have moved."""
    assert "the load has shifted" in [event["reason"] for event in pipeline.ranks[0].events("recovered")]


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_kill_leaves_the_bits_of_a_run_without_failures(start_job, undisturbed, plan):
    pipeline = Pipeline(start_job(RANKS), **WAYS[undisturbed[0]])
    started = [pipeline.start(rank, **(plan if rank == 3 else {})) for rank in range(RANKS)]
    pipeline.lose(started[3])
    pipeline.start(3)
    check_same_bits(pipeline, undisturbed)
    assert_moved(pipeline)


@pytest.mark.long
def test_a_lost_stage_gets_its_placement_from_the_other_one(start_job, undisturbed):
    if undisturbed[0] == "moetion":
        pytest.skip("its copies are with the peer, which is lost, too")
    pipeline = Pipeline(start_job(RANKS), **WAYS["baft"])
    plans = {rank: {"kill_in_step": MOVES + 2, "kill_with": rank ^ 1} for rank in (2, 3)}
    started = [pipeline.start(rank, **plans.get(rank, {})) for rank in range(RANKS)]
    for rank in plans:
        pipeline.lose(started[rank])
    for rank in plans:
        pipeline.start(rank)
    check_same_bits(pipeline, undisturbed)
    assert_moved(pipeline)


@pytest.mark.long
def test_after_a_crash_of_all_processes_others_place_the_experts_anew(start_job, undisturbed):
    way, _, steps = undisturbed
    pipeline = Pipeline(start_job(RANKS), **WAYS[way])
    started = [pipeline.start(rank) for rank in range(RANKS)]
    started[0].wait_for("step", step=MOVES + 2)
    for each in started:
        each.process.kill()
    for each in started:
        each.process.join(PATIENCE)
    for rank in range(RANKS):
        pipeline.start(rank)
    done = pipeline.finish()
    exact = losses(steps)
    for each in pipeline.ranks:
        for event in each.events("step"):
            assert event["loss"] == pytest.approx(exact[each.options.rank][event["step"]], rel=1e-5)
    assert [each["different"] for each in done] == [[]] * RANKS


def test_replicas_on_two_nodes_need_no_copies(start_job):
    copies = {"preset": "moetion", "expert_parallel": evermoe.Placement(min_replicas=2)}
    pipeline = Pipeline(start_job(RANKS), **COMMON | {"steps": 6, "copies": copies | {"replication": 2}})
    started = [pipeline.start(rank, **({"kill_in_step": 3} if rank == 3 else {})) for rank in range(RANKS)]
    pipeline.lose(started[3])
    pipeline.start(3)
    done = pipeline.finish()
    report = started[0].events("recovered")[-1]
    assert (report["step"], report["stale"], report["steps_undone"]) == (3, {}, 0)
    assert [each["sent_bytes"] for each in done] == [0] * RANKS
    assert [len(experts_of(each)) for each in done] == [EXPERTS] * RANKS
    assert [each["different"] for each in done] == [[]] * RANKS


# ---- decisions of one rank

PATH = "stage0.0.experts"


def config(versions=None, **options):
    versions = versions or PipelineBaft()
    return PipelineConfig(
        **{
            "stage": 0,
            "stages": 2,
            "data_parallel_size": 2,
            "versions": versions,
            "copies": CopyConfig(preset=versions, replication=2),
            "membership": evermoe.Membership(lighthouse="http://localhost:1", job="x"),
            "expert_parallel": PLACEMENT,
        }
        | options
    )


def make(options, nodes="abcd"):
    """The first rank's state and placement in a pipeline of four, whose other stage has no experts."""
    torch.manual_seed(0)
    module = nn.Sequential(evermoe.MoE(16, 64, EXPERTS))
    state = StageState(module, torch.optim.AdamW(module.parameters()), 0, 2, options.place, 1, options.chooses_experts)
    placement = StagePlacement(options, state, SimpleNamespace(trainer_group=Group(), side_group=Group()))
    units = [state.own.sizes(), [("stage1.a", 8)]]
    experts = [placement.experts(), {}]
    layout = [StageRank(n // 2, n % 2, nodes[n], str(n // 2), units[n // 2], experts[n // 2]) for n in range(4)]
    placement.learn(layout)
    return state, placement, layout


def hosts(placement):
    """Ranks that train each expert, by its number."""
    names = [f"{PATH}.{expert}" for expert in range(EXPERTS)]
    return [[rank for rank, each in enumerate(placement.layout) if name in each.own] for name in names]


def use(state, load_E):
    """Count a step's tokens."""
    for layer in state.layers.values():
        layer.count.add(np.array(load_E), is_counted=True)
    state.expert_load.add_step()
    state.expert_load.forget_step()


def test_without_options_of_replicas_each_expert_has_one_rank():
    _, placement, _ = make(config(expert_parallel=True))
    assert hosts(placement) == [[0], [0], [1], [1], [1]]
    assert not placement.moves(MOVES, dict)


def test_experts_move_before_the_step_at_which_ranks_compare_loads():
    state, placement, layout = make(config())
    placement.adopt({}, {})
    before = hosts(placement)
    assert sorted(map(len, before)) == [1, 1, 1, 1, 2], "3 slots on each of two ranks"
    popular = next(expert for expert, ranks in enumerate(before) if len(ranks) == 1)
    use(state, [100 if expert == popular else 1 for expert in range(EXPERTS)])
    assert not placement.moves(MOVES - 1, dict)
    assert placement.moves(MOVES, dict)
    assert hosts(placement) == before, "until all ranks have met"
    assert placement.decided == MOVES
    placement.choose(MOVES - 1)
    assert hosts(placement) == before, "for steps that are computed again"
    assert placement.moves(MOVES, dict), "once these are computed"
    placement.choose(MOVES)
    after = hosts(placement)
    assert after[popular] == [0, 1]
    assert not placement.moves(MOVES, dict)
    placement.learn([replace(layout[0], decided=MOVES), *layout[1:]])  # with a new process
    assert hosts(placement) == after
    placement.adopt({}, {})
    use(state, [1] * EXPERTS)
    assert not placement.moves(MOVES, dict), "which was decided"


def test_a_load_that_is_even_moves_nothing():
    state, placement, _ = make(config())
    placement.adopt({}, {})
    use(state, [10] * EXPERTS)
    assert not placement.moves(MOVES, dict)
    assert placement.decided == MOVES


def holders(layout, preset, unit):
    """Of each bundle with a unit, the ranks that keep it."""
    return [bundle.holders for bundle in stage_bundles(preset, layout, 2) if unit in bundle.units]


@pytest.mark.parametrize(
    ("nodes", "preset", "trained", "expected"),
    [
        ("abcd", "moetion", [0, 1], [{0}, {1}]),
        ("abcd", "moetion", [0], [{0, 1}]),
        ("aacd", "moetion", [0, 1], [{0, 2}]),
        ("abcd", "baft", [0, 1], [{0, 2}]),
    ],
)
def test_replicas_on_other_nodes_take_the_place_of_copies(nodes, preset, trained, expected):
    units = [[(f"stage{stage}.a.{n}", 8) for n in range(2)] for stage in (0, 1)]
    layout = [StageRank(n // 2, n % 2, nodes[n], "", units[n // 2], own=[f"stage{n // 2}.a.1"]) for n in range(4)]
    layout[: len(trained)] = [replace(layout[rank], own=["stage0.a.0"]) for rank in trained]
    found = [{*each} for each in holders(layout, preset, "stage0.a.0")]
    if preset == "moetion" and nodes == "aacd":
        assert len(found) == 1
        assert len({nodes[rank] for rank in found[0]}) == 2
    else:
        assert found == expected


def test_ranks_share_the_copies_of_replicas():
    names = [f"a.{n}" for n in range(6)]
    layout = [StageRank(0, n, "ab"[n], "", [(name, 8) for name in names], own=names[: 5 + n]) for n in range(2)]
    found = stage_primaries(layout, range(2))
    assert found["a.5"] == 1
    assert sorted(found.values()) == [0, 0, 0, 1, 1, 1]


def test_a_budget_is_for_experts_that_lack_copies():
    size = make(config())[0].own.by_name[f"{PATH}.0"].nbytes
    options = config(PipelineMoetion(remote_bytes_per_step=size))
    state, _, _ = make(options)
    membership = SimpleNamespace(trainer_group=Group(), side_group=Group())
    planner = SimpleNamespace(versions=VersionDivision(1))
    experts = ChosenExperts(options, state, membership, planner)
    kept = [Bundle((0,), (f"{PATH}.0",)), Bundle((0, 2), (f"{PATH}.1",)), Bundle((0, 2), (f"{PATH}.2",))]
    experts.keep(kept)
    for layer in state.layers.values():
        layer.count.add(np.array([100, 5, 9, 0, 0]), is_counted=True)
    experts.taken(1, is_repeated=False)
    assert experts.choose(1) == {1}, "replicas keep the first one, so the third one is sent"


class Reducer:
    """Counts the sums, of which the next one may fail."""

    def __init__(self):
        self.sums, self.fails = 0, True

    def reduce(self, gradients, group):
        self.sums += 1
        if self.fails:
            raise PeerLost("a rank is lost")


def test_sums_over_replicas_that_were_interrupted_are_computed_from_new_gradients():
    _, placement, _ = make(config())
    placement.adopt({}, {})
    placement._reducer = reducer = Reducer()
    log = BorderLog(list)
    past = log.begin_step(0)
    past.chunk(0, 0, 0)
    with pytest.raises(PeerLost):
        placement.sum_replicas(past)
    log.interrupt()
    assert not log.steps, "some gradients may be sums"
    reducer.fails, past = False, log.begin_step(0)
    past.chunk(0, 0, 0)
    before = log.computed()
    placement.sum_replicas(past)
    placement.sum_replicas(past)
    assert reducer.sums == 2, "once more, and not again"
    assert log.computed() != before, "peers that are not as far compute the step again, and so does this rank"
