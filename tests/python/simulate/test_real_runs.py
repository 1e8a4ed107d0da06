"""A job by hand, and what its plan, its simulation, its forecast of memory and a real run of it find."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from typing import NamedTuple

import pytest
from rich.console import Console

from evermoe import _native
from evermoe.demo.driver import Run
from evermoe.demo.flags import add_arguments, check
from evermoe.demo.model import ByteGPT
from evermoe.demo.summary import commits, episodes
from evermoe.planning.footprint import footprint
from evermoe.planning.models import ModelShape
from evermoe.planning.protection import LOG_STEPS
from evermoe.planning.seating import FootprintOptions
from evermoe.simulate import Failure, Scenario, Workload, simulate
from evermoe.simulate.scenario import SimulatedOptions

WORKERS, STEPS, KILL = 3, 16, (1, 6)
COUNTER = 4
"""Bytes of AdamW's count of steps, which each unit has in addition to 12 for each parameter."""
SIZES = {"layers": 1, "hidden": 32, "heads": 2, "intermediate": 48, "experts": 3, "top_k": 2, "sequence": 32}


def options():
    """Each expert on one worker; of two that are left each runs one more, whichever that is."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    sizes = [part for name, size in SIZES.items() for part in (f"--{name.replace('_', '-')}", str(size))]
    flags = ["--workers", str(WORKERS), "--steps", str(STEPS), "--kill", f"{KILL[0]}@{KILL[1]}", "--expert-slots", "1"]
    return parser.parse_args([*flags, *sizes, "--batch", "12", "--no-join", "--no-baseline"])


def workload():
    model = ByteGPT(**SIZES)
    moe = model.blocks[0].moe
    experts = sum(p.numel() for p in moe.parameters()) - sum(p.numel() for p in moe.router.parameters())
    return Workload(
        name="demo",
        layers=1,
        experts=SIZES["experts"],
        expert_parameters=experts // SIZES["experts"],
        dense_parameters=sum(p.numel() for p in model.parameters()) - experts,
        step_seconds=1.0,
        state_bytes=12,
        gradient_bytes=4,
        weight_bytes=4,
        scaling=0.0,
    )


WORKLOAD = workload()
GRADIENT, STATE = 4 * WORKLOAD.expert_parameters, 12 * WORKLOAD.expert_parameters
MODEL = 12 * WORKLOAD.parameters


class Row(NamedTuple):
    """Effects of a preset on the job; bytes are without heads of messages."""

    undone: int
    """Steps that the loss undoes."""
    step: int
    """Bytes to peers in each step before the loss."""
    copied: int
    """Bytes to peers in all steps, of which ten have two workers."""
    memory: int | None
    """Bytes of the worker with the most, where modules that are no experts have owners: what it trains, and copies."""
    first: int | None = None
    """Bytes of first copies, after the loss, too. None where all go back: the simulation divides modules otherwise."""
    moved: int | None = None
    """Bytes that the survivors get, from copies of their own or from each other; None as for `first`."""


TABLE = {
    "auto": Row(0, 3 * GRADIENT, (6 * 3 + 10 * 2) * GRADIENT, 1215552, (3 + 2) * STATE, 2 * STATE),
    "gemini": Row(1, MODEL, (STEPS + 1) * MODEL, 754240),
    "baft": Row(1, MODEL, (STEPS + 1) * MODEL, 754240),
    "moetion": Row(0, 3 * GRADIENT, (6 * 3 + 10 * 2) * GRADIENT, 1215552, (3 + 2) * STATE, 2 * STATE),
    "lazarus": Row(0, 0, 0, None, 0, 0),
}


def job(preset):
    """As `options` says; with active replicas alone each expert is on two workers, then on both that are left."""
    slots, budget = 2 if preset == "lazarus" else 1, 3 * STATE  # moetion's: all experts
    chosen = SimulatedOptions(expert_slots=slots, checkpoint_interval=0, remote_bytes_per_step=budget)
    failures = (Failure.in_steps([(KILL[1], [KILL[0]])]),)
    return Scenario(WORKLOAD, nodes=WORKERS, steps=STEPS, failures=failures, options=chosen)


@pytest.mark.parametrize("preset", TABLE)
def test_a_plan_has_the_bytes_and_versions_of_the_table(preset):
    scenario, row = job(preset), TABLE[preset]
    lasting = replace(scenario.options, checkpoint_interval=1000)
    planned = json.loads(_native.forecast(replace(scenario, failures=(), options=lasting).to_json(), preset))
    found = planned["undone_steps"], planned["peer_bytes"], planned["lost_tokens"], planned["survives"]
    assert found == (row.undone, row.step, 0, 1)


@pytest.mark.parametrize("preset", TABLE)
def test_a_simulation_has_the_events_bytes_and_versions_of_the_table(preset):
    row, outcome = TABLE[preset], simulate(job(preset), preset, seed=0)
    happened = [(each.what, each.step, each.members) for each in outcome.happened]
    assert happened == [("resumed", 0, 3), ("lost", KILL[1], 3), ("resumed", KILL[1] - row.undone, 2)]
    assert (outcome.steps, outcome.interrupted_steps, outcome.undone_steps) == (STEPS, 1, row.undone)
    assert (outcome.lost_tokens, outcome.copy_bytes) == (0, row.copied)
    if row.first is not None:
        assert (outcome.first_bytes, outcome.recovery_bytes + outcome.local_bytes) == (row.first, row.moved)


@pytest.mark.parametrize("preset", [name for name, row in TABLE.items() if row.memory])
def test_a_simulation_and_the_forecast_of_memory_have_that_of_the_table(preset):
    options = replace(job(preset).options, shard_optimizer=True)
    simulated = simulate(replace(job(preset), failures=(), options=options), preset, seed=0)
    assert simulated.memory_bytes == TABLE[preset].memory
    sizes = {name: getattr(WORKLOAD, name) for name in ("layers", "experts", "expert_parameters", "dense_parameters")}
    chosen = FootprintOptions(workers=WORKERS, weights="float32", expert_slots=1, shard_optimizer=True, preset=preset)
    (step,) = (m for m in footprint(ModelShape(**sizes, largest_module=0), chosen).moments if m.phase == "step")
    room = [use.replicas * GRADIENT // STATE * LOG_STEPS for use in step.uses]  # the forecast has what is in use
    found = [use.parameters + use.moments + use.replicas + use.snapshots for use in step.uses]
    assert max(map(sum, zip(found, room, strict=True))) == TABLE[preset].memory


@pytest.mark.long
@pytest.mark.parametrize("preset", TABLE)
def test_a_real_run_has_the_events_bytes_and_versions_of_the_table(preset, tmp_path):
    given, row = options(), TABLE[preset]
    given.preset, given.expert_slots = preset, job(preset).options.expert_slots
    if preset == "moetion":
        vars(given)["moetion.remote_bytes_per_step"] = 3 * (STATE + COUNTER)
    events = Run(given, tmp_path, console=Console(quiet=True), title="").run_workers(
        check(given), None, given.steps, given.replication
    )
    (episode,) = episodes(events)
    assert (episode.step, episode.members, len(commits(events))) == (KILL[1], WORKERS - 1, STEPS)
    (recovered,) = [each for each in events[0] if each["event"] == "recovered" and each["members"] == episode.members]
    assert recovered["steps_undone"] in {row.undone, 0}, "the newest copies may be complete before the kill"
    assert recovered["step"] == KILL[1] - recovered["steps_undone"]
    assert not recovered["stale"] and not recovered["lost_units"]
    measured = [[each for each in found if each["event"] == "measured"] for found in events.values()]
    before, all_sent = (
        sum(sum(rows[-1]["sent_bytes"].values()) for rows in found)
        for found in ([[each for each in rows if each["step"] < KILL[1]] for rows in measured], measured)
    )
    if row.first is None:  # first copies before the first step; the last version may be on its way
        assert (KILL[1] - 1) * row.step <= before <= (KILL[1] + 1) * 1.1 * row.step
        assert (STEPS - 2) * row.step <= all_sent <= (STEPS + 2) * 1.1 * row.step
        return  # what goes back is fetched by all
    assert before == pytest.approx(KILL[1] * row.step, rel=0.02), "messages have heads, and gradients are encoded"
    after = row.first - (3 * STATE if row.first else 0)
    assert all_sent == pytest.approx(row.copied + after, rel=0.02)
    assert episode.fetched_bytes == row.moved + COUNTER * episode.fetched_units
    replanned = [each["missing_bytes"] for each in events[0] if each["event"] == "protection_planned"][-1]
    copied, rest = divmod(replanned, STATE + COUNTER)
    assert (copied * STATE, rest) == (max(0, row.first - 3 * STATE), 0)
