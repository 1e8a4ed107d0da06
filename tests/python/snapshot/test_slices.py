"""Slices of sparse versions: as even as can be, and a complete window is left wherever ranks are lost."""

from __future__ import annotations

import itertools
import random

import pytest

from evermoe import _native
from evermoe.copies.snapshot.slices import (
    UnitBytes,
    bytes_per_step,
    even_slices,
    fill_slices,
    newest_dense,
    newest_window,
    weights_of,
)


def every_cut(count, steps):
    """Return all ways to cut this number of units, in their order, into at most `slices` slices."""
    for ends in itertools.combinations_with_replacement(range(count + 1), steps - 1):
        yield [sum(unit >= end for end in ends) for unit in range(count)]


def some_units(seed):
    draw = random.Random(seed)
    return [UnitBytes(draw.randint(0, 9), draw.choice([0, draw.randint(0, 30)])) for _ in range(draw.randint(1, 6))]


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_the_most_bytes_of_a_step_are_as_few_as_in_any_cut(steps):
    for seed in range(120):
        units = some_units(seed)
        places = even_slices(units, steps)
        assert places == sorted(places), "slices follow the units' order"
        assert max(places) < steps
        fewest = min(max(bytes_per_step(units, each, steps)) for each in every_cut(len(units), steps))
        assert max(bytes_per_step(units, places, steps)) == fewest, (seed, units)


def test_a_limit_is_kept_with_as_few_slices_as_in_any_cut():
    impossible = 0
    for seed, most in itertools.product(range(60), (5, 20, 40, 60, 80)):
        units = some_units(seed)
        found = fill_slices(units, most)
        cuts = [
            max(places) + 1
            for places in every_cut(len(units), len(units))
            if max(bytes_per_step(units, places, len(units))) <= most
        ]
        impossible += not cuts
        assert (None if found is None else max(found) + 1) == min(cuts, default=None), (seed, units, most)
    assert 0 < impossible < 60 * 5


def test_adam_in_n_slices_takes_a_share_of_the_state_and_the_weights():
    """Of 64 experts with two moments for each weight: a step has less than the weights and an n-th of the rest."""
    units = [UnitBytes(100, 200)] * 64
    for steps in (2, 4, 8):
        found = bytes_per_step(units, even_slices(units, steps), steps)
        assert len(found) == steps
        assert max(found) < 6400 + 12800 / steps
        assert sum(found) / steps > 0.85 * max(found), "no step has much more than the others"


# ---- what is left of windows after losses

HOLDERS = {"a": (0, 2), "b": (0, 2), "c": (1, 3), "d": (1, 3)}
"""Units of a stage of ranks 0 and 1, whose copies the ranks 2 and 3 keep."""
PLACES = {2: {"a": 0, "b": 1, "c": 0, "d": 1}, 3: {"a": 0, "b": 2, "c": 1, "d": 2}}


class Kept:
    """The arenas of all ranks for all steps of a window, each with room for two versions."""

    def __init__(self, folder, steps):
        self.places, self.arenas = PLACES[steps], {}
        for number, (rank, step) in enumerate(itertools.product(range(4), range(steps))):
            mine = [unit for unit, ranks in HOLDERS.items() if rank in ranks]
            names = [unit for unit in mine if self.places[unit] == step]
            names += [weights_of(unit, step) for unit in mine if self.places[unit] > step]
            if names:
                path = str(folder / f"{number}.arena")
                self.arenas[rank, step] = _native.Arena.create(path, "{}", [(name, 64) for name in names])

    def write(self, version, step):
        """Write the arenas of a step one by one, and stop before and after each of them is complete."""
        for (_, at), arena in self.arenas.items():
            if at == step:
                index = arena.begin(version)
                yield
                arena.commit(index)
                yield

    def held(self, lost):
        """Return what is left when some ranks are lost: names and versions."""
        return {
            (name, version)
            for (rank, _), arena in self.arenas.items()
            if rank not in lost
            for _, version in arena.versions()
            for name, _, _ in arena.units()
        }


def steps_of_a_job(kept, steps, last):
    """Writes a dense version 0 and then windows; yields the steps that are taken, wherever ranks may die."""
    for step in range(steps):
        for _ in kept.write(0, step):
            pass
    for taken in range(1, last + 1):
        yield taken
        for _ in kept.write(taken, (taken - 1) % steps):
            yield taken


@pytest.mark.parametrize("steps", PLACES)
@pytest.mark.parametrize("lost", [(), (0,), (1,), (0, 1), (2,), (2, 3), (0, 3), (1, 2)], ids=str)
def test_a_complete_window_is_left_wherever_ranks_are_lost(tmp_path, steps, lost):
    """One rank, both of the stage, or both that keep its copies; or one of each, for different units."""
    kept, used = Kept(tmp_path, steps), set()
    for taken in steps_of_a_job(kept, steps, 5 * steps):
        held = kept.held(lost)
        dense, window = newest_dense(held, HOLDERS), newest_window(held, kept.places)
        found = max(-1 if dense is None else dense, -1 if window is None else window)
        assert found >= 0, (taken, sorted(held))
        assert found >= taken - (2 * steps - 1), "it goes back by twice the steps of a window, less one"
        assert window is None or window % steps == 1
        assert dense in (None, 0), "no version but the first one is captured completely"
        used.add(found)
    assert used == {0, *range(1, 4 * steps + 2, steps)}


@pytest.mark.parametrize("steps", PLACES)
def test_without_a_rank_and_the_one_with_its_copies_nothing_is_left(tmp_path, steps):
    kept = Kept(tmp_path, steps)
    for _ in steps_of_a_job(kept, steps, 3 * steps):
        held = kept.held((0, 2))
        assert newest_dense(held, HOLDERS) is None
        assert newest_window(held, kept.places) is None
