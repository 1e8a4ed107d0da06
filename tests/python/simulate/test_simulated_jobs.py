"""The Python face of simulations."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from evermoe.planning.models import MODELS
from evermoe.planning.presets import PRESET_NAMES
from evermoe.simulate import (
    SCHEMES,
    Constants,
    Failure,
    Scenario,
    Workload,
    read_constants,
    simulate,
    simulate_seeds,
    write_constants,
)
from evermoe.simulate.engine import Interval
from evermoe.simulate.scenario import SimulatedOptions

POISSON = Failure.poisson(mtbf_seconds=1800, repair_seconds=600)


def small(**changes):
    workload = Workload.preset("gpt-s-moe", step_seconds=20.0)
    return replace(Scenario(workload, nodes=8, days=0.5, zipf=1.0, failures=(POISSON,)), **changes)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_time_adds_up_and_a_seed_repeats(scheme):
    outcome = simulate(small(), scheme, seed=1)
    assert sum(outcome.nanoseconds.values()) == 43_200 * 10**9
    assert sum(outcome.seconds_by_cause.values()) == pytest.approx(outcome.seconds)
    assert outcome.losses > 5 and outcome.steps > 500
    assert 0.3 < outcome.ettr < 1 and 0 < outcome.goodput < 1
    assert outcome == simulate(small(), scheme, seed=1)
    assert outcome != simulate(small(), scheme, seed=2)


def test_numbers_of_an_outcome_fit_each_other():
    outcome = simulate(small(), "gemini", seed=3)
    tokens = 1 << 20
    assert outcome.repeated_tokens == (outcome.undone_steps + outcome.interrupted_steps) * tokens
    kept = outcome.steps * tokens - outcome.lost_tokens
    assert outcome.goodput_tokens_per_second * outcome.seconds == pytest.approx(kept)
    assert outcome.goodput == pytest.approx(outcome.goodput_tokens_per_second * 20.0 / tokens)
    assert outcome.fewest_members <= outcome.mean_members <= 8
    assert outcome.copy_bytes > outcome.recovery_bytes > 0 and outcome.local_bytes >= 0
    assert outcome.checkpoint_loads == outcome.restarts == 0
    assert len(outcome.recovery_seconds) <= outcome.losses


def test_every_preset_of_a_session_can_be_simulated():
    assert set(PRESET_NAMES) < set(SCHEMES)


@pytest.mark.parametrize("name", MODELS)
def test_every_known_model_can_be_simulated(name):
    scenario = replace(small(days=0.02, failures=()), workload=Workload.preset(name, step_seconds=20.0))
    assert simulate(scenario, "auto", seed=0).steps > 50


def test_intervals_over_seeds():
    told = []
    sample = simulate_seeds(small(), "auto", seed=5, seeds=3, progress=told.append)
    assert [each.steps for each in sample.outcomes] == [simulate(small(), "auto", seed=s).steps for s in (5, 6, 7)]
    assert told == sorted(told) and told[-1] == 1
    ettr = sample.interval("ettr")
    assert 0 < ettr.half < 0.2 and ettr.mean == pytest.approx(sum(each.ettr for each in sample.outcomes) / 3)
    assert Interval.of([1.0, 3.0]).half == pytest.approx(12.706)
    with pytest.raises(ValueError, match=r"name: expected one of .*ettr"):
        sample.interval("speed")


def test_what_the_callback_raises_ends_the_simulation():
    class Enough(Exception):
        pass

    def stop(part):
        raise Enough

    with pytest.raises(Enough):
        simulate(small(), "auto", seed=1, progress=stop)


def test_traces(tmp_path):
    bamboo = tmp_path / "bamboo.csv"
    bamboo.write_text("0,add,a\n0,add,b\n0,add,c\n600000,remove,b\n720000,add,d\n")
    trace = Failure.trace(bamboo)
    assert trace.most_nodes == 3
    outcome = simulate(small(nodes=3, days=0.02, failures=(trace,)), "auto", seed=1)
    assert (outcome.losses, outcome.fewest_members) == (1, 2)
    assert [each.what for each in outcome.happened] == ["resumed", "lost", "resumed", "resumed"]
    nodes = []
    for number, data in enumerate(([0, 0, 0], [0, 1, 0])):
        nodes.append(tmp_path / f"{number}.json")
        nodes[-1].write_text(json.dumps({"metadata": {"gap_seconds": 300}, "data": data}))
    outcome = simulate(small(nodes=2, days=0.02, failures=(Failure.trace(*nodes),)), "auto", seed=1)
    assert (outcome.losses, outcome.fewest_members) == (1, 1)
    bamboo.write_text("0,gone,a\n")
    with pytest.raises(ValueError, match=r"bamboo\.csv: line 1: expected milliseconds,add|remove,node"):
        Failure.trace(bamboo)


def test_nodes_come_and_go_at_given_times():
    events = [(0.0, True, range(8)), (5000.0, False, [1, 4]), (9000.0, True, [1])]
    outcome = simulate(small(failures=(Failure.at_times(events),)), "auto", seed=0)
    assert outcome.losses == 2 and outcome.fewest_members == 6
    lost, *_ = (each.seconds for each in outcome.happened if each.what == "lost")
    assert lost == pytest.approx(5000 + Constants().detect_seconds, abs=0.01)
    assert outcome.happened[-1].members == 7


def test_restarts_share_the_experts_over_two_nodes_by_default():
    scenarios = [small(), small(expert_parallel=2), small(expert_parallel=1)]
    default, pairs, alone = (simulate(scenario, "restart", seed=1) for scenario in scenarios)
    assert default == pairs
    assert default.goodput < 0.9 * alone.goodput, "the busier node of two delays the other"
    assert simulate(small(nodes=1), "restart", seed=1).steps > 0


@pytest.mark.parametrize("scheme", ["gemini", "moetion"])
def test_copies_that_do_not_fit_are_missing(scheme):
    roomy, tight = (simulate(small(host_bytes=room), scheme, seed=1) for room in (1 << 40, 10**9))
    none = simulate(small(host_bytes=0), scheme, seed=1)
    assert roomy.missing_copy_bytes == 0 < tight.missing_copy_bytes <= none.missing_copy_bytes
    assert roomy.memory_bytes > tight.memory_bytes >= none.memory_bytes
    assert roomy.checkpoint_loads < none.checkpoint_loads
    assert none.copy_bytes == none.first_bytes == 0


def test_losses_in_steps():
    scenario = small(failures=(Failure.in_steps([(10, [1]), (20, [2, 3])]),))
    outcome = simulate(scenario, "auto", seed=1)
    lost = [each for each in outcome.happened if each.what == "lost"]
    assert [(each.step, each.members) for each in lost] == [(10, 8), (20, 7)]
    assert outcome.losses == 3 and outcome.interrupted_steps == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 0}, "cluster.nodes: expected 1 or more"),
        ({"days": -1.0}, "seconds: expected a finite number above 0"),
        ({"zipf": float("inf")}, "load.zipf|scenario"),
        ({"failures": (Failure.poisson(mtbf_seconds=0, repair_seconds=1),)}, "mtbf_seconds: expected"),
        ({"options": SimulatedOptions(expert_slots=3, most_slots=2)}, "session.slots: expected at most most_slots"),
        ({"load_trace": ((0, (1.0,)),)}, "load.trace: expected 8 numbers"),
    ],
)
def test_scenarios_that_are_none(changes, message):
    with pytest.raises(ValueError, match=message):
        simulate(small(**changes), "auto", seed=1)


def test_names_that_are_none():
    with pytest.raises(ValueError, match="presets: expected some of gemini, pec"):
        simulate(small(), "none", seed=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model: expected a file or one of gpt-s-moe"):
        Workload.preset("none", step_seconds=1.0)
    with pytest.raises(ValueError, match="step_seconds"):
        Workload.preset("gpt-s-moe", step_seconds=0.0)


def test_constants_of_a_file(tmp_path):
    path = tmp_path / "here" / "constants.json"
    constants = Constants(detect_seconds=1.5, source="measured by a test")
    write_constants(constants, path, {"step_seconds": 0.1})
    assert read_constants(path) == constants
    assert read_constants(path).source.startswith("measured")
    for text, message in [
        ("{", "expected JSON"),
        ("[]", "expected an object with"),
        ('{"evermoe_constants": 1, "speed": 3}', "got 'speed'"),
        ('{"evermoe_constants": 1, "detect_seconds": -1}', "detect_seconds: expected a finite number, 0 or more"),
        ('{"evermoe_constants": 1, "digest_bytes_per_second": 0}', "above 0, got 0"),
    ]:
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            read_constants(path)


def test_a_model_of_a_file(tmp_path):
    path = tmp_path / "mine.json"
    fields = {"layers": 2, "experts": 4, "expert_parameters": 1000, "dense_parameters": 5000, "step_seconds": 1.0}
    path.write_text(json.dumps(fields))
    workload = Workload.read(path, step_seconds=2.0)
    assert (workload.name, workload.parameters, workload.step_seconds) == ("mine", 13_000, 2.0)
    for data, message in [({"speed": 1}, "got 'speed'"), ({}, "missing"), (fields | {"layers": -1}, "layers")]:
        path.write_text(json.dumps(data))
        with pytest.raises(ValueError, match=message):
            Workload.read(path)
