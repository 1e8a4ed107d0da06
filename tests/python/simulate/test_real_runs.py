"""A real run of the demo, the simulation of it, and its plan: the same events, steps and bytes."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace

import pytest
from rich.console import Console

from evermoe import _native
from evermoe.demo.driver import Run
from evermoe.demo.flags import add_arguments, check
from evermoe.demo.model import ByteGPT
from evermoe.demo.summary import commits, episodes
from evermoe.simulate import Failure, Scenario, Workload, simulate
from evermoe.simulate.scenario import SimulatedOptions

WORKERS, STEPS, KILL = 3, 16, (1, 6)
COUNTER = 4
"""Bytes of AdamW's count of steps, which each unit has in addition to 12 for each parameter."""
LATE = ("gemini", "baft")
"""Presets whose copies of a step are complete with the vote on the next one, so that a loss undoes a step."""
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


def assert_as_planned(events, scenario, preset):
    """The plan has the loss's undone steps, and the bytes of the steps before it."""
    lasting = replace(scenario.options, checkpoint_interval=1000)
    given = replace(scenario, failures=(), options=lasting)
    planned = json.loads(_native.forecast(given.to_json(), preset))
    assert (planned["undone_steps"], planned["lost_tokens"], planned["survives"]) == (int(preset in LATE), 0, 1)
    if preset == "moetion":
        return  # its budget follows from measured links
    measured = [[e for e in found if e["event"] == "measured" and e["step"] < KILL[1]] for found in events.values()]
    sent = sum(sum(found[-1]["sent_bytes"].values()) for found in measured)
    steps = KILL[1]
    if preset in LATE:  # first copies before the first step; the last version may be on its way
        assert (steps - 1) * planned["peer_bytes"] <= sent <= (steps + 1) * 1.1 * planned["peer_bytes"]
    else:  # messages have heads, and gradients are encoded
        assert sent == pytest.approx(steps * planned["peer_bytes"], rel=0.02)


@pytest.mark.long
@pytest.mark.parametrize("preset", ["auto", "gemini", "baft", "moetion", "lazarus"])
def test_events_steps_and_bytes_are_those_of_a_real_run(preset, tmp_path):
    given = options()
    given.preset = preset
    if preset == "lazarus":  # active replicas alone: each expert on two workers, then on both that are left
        given.expert_slots = 2
    kills = check(given)
    events = Run(given, tmp_path, console=Console(quiet=True), title="").run_workers(
        kills, None, given.steps, given.replication
    )
    (episode,) = episodes(events)
    scenario = Scenario(
        workload(),
        nodes=WORKERS,
        steps=STEPS,
        failures=(Failure.in_steps([(KILL[1], [KILL[0]])]),),
        options=SimulatedOptions(expert_slots=given.expert_slots, checkpoint_interval=0),
    )
    assert_as_planned(events, scenario, preset)
    outcome = simulate(scenario, preset, seed=0)
    begin, lost, resumed = outcome.happened
    assert [each.what for each in outcome.happened] == ["resumed", "lost", "resumed"]
    undone = int(preset in LATE)
    assert (begin.step, lost.step, resumed.step) == (0, episode.step, KILL[1] - undone)
    assert (begin.members, resumed.members) == (WORKERS, episode.members)
    assert len(commits(events)) == outcome.steps == STEPS
    assert outcome.interrupted_steps == 1 and outcome.lost_tokens == 0
    (recovered,) = [each for each in events[0] if each["event"] == "recovered" and each["members"] == resumed.members]
    assert outcome.undone_steps == undone
    assert recovered["steps_undone"] in {undone, 0}, "the newest copies may be complete before the kill"
    assert not recovered["stale"] and not recovered["lost_units"]
    if undone:
        return  # what goes back is fetched by all, and the simulation divides what is no expert into other units
    moved = outcome.recovery_bytes + outcome.local_bytes
    assert episode.fetched_bytes == moved + COUNTER * episode.fetched_units
    replanned = [each["missing_bytes"] for each in events[0] if each["event"] == "protection_planned"][-1]
    expert_bytes = 12 * scenario.workload.expert_parameters
    copied, rest = divmod(replanned, expert_bytes + COUNTER)
    first = 0 if preset == "lazarus" else SIZES["experts"]
    assert (outcome.first_bytes, rest) == ((first + copied) * expert_bytes, 0)
