"""Random numbers of all global generators: the same again for the same seeds, and what a script had afterwards."""

import random

import numpy as np
import pytest
import torch

import evermoe
from evermoe import ElasticSampler, Session
from evermoe.process.seeds import seeded
from support.habits import DATA, DIES_IN, Model, adamw, mean_loss
from support.own_steps import drawing_steps


def draw(device="cpu"):
    """A number of each generator."""
    return random.random(), np.random.rand(), torch.rand((), device=device).item()


@pytest.fixture(autouse=True)
def own_generators():
    """Other tests draw what they would have drawn."""
    with seeded(0):
        yield


def test_the_same_numbers_draw_the_same_in_all_generators(device):
    torch.zeros(1, device=device)  # a GPU's generator exists from here on
    before = draw(device)
    with seeded(3, 5, 1):
        first = draw(device)
    with seeded(3, 5, 1):
        assert draw(device) == first
        with seeded(3, 5, 2):
            assert not set(draw(device)) & set(first)
    with seeded(0):
        draw(device)
        assert draw(device) != before


def test_generators_continue_where_they_were(device):
    torch.zeros(1, device=device)
    with seeded(1):
        expected = [draw(device) for _ in range(3)]
    with seeded(1):
        assert draw(device) == expected[0]
        with pytest.raises(KeyError), seeded(2):
            draw(device)
            raise KeyError
        assert draw(device) == expected[1]
        with seeded(2):
            draw(device)
        assert draw(device) == expected[2]


def test_steps_do_not_change_what_a_script_draws_between_them(tmp_path):
    """The seed of a step is for its block."""
    with seeded(4):
        expected = [draw() for _ in range(4)]
    with seeded(4):
        model = Model()
    inside, between = [], []
    session = Session(
        model, adamw(model), ElasticSampler(len(DATA), 12), membership=evermoe.Membership(memory_dir=str(tmp_path))
    )
    with seeded(4):
        for step in session.steps(3):
            between.append(draw())
            with step:
                inside.append(draw())
                step.backward(mean_loss(model, DATA[step.indices]))
        between.append(draw())
    assert between == expected
    assert len(set(inside)) == 3


def test_a_step_that_a_death_interrupts_draws_the_same_again(start):
    """On each rank its own numbers: the members that keep their ranks draw the same in both attempts."""
    found, logs = start(drawing_steps, "abc")
    drawn = {name: [event for event in found[name] if event["event"] == "drew"] for name in "abc"}
    attempts = {name: [each for each in drawn[name] if each["step"] == DIES_IN] for name in "ab"}
    assert [len(each) for each in attempts.values()] == [2, 2], logs
    for name, (first, second) in attempts.items():
        assert first == second, f"{name}: {first} and {second}"
    values = [value for events in drawn.values() for event in events for value in event["numbers"]]
    assert len(set(values)) == len(values) - 2 * 3, "only the repeated step draws a number twice"
