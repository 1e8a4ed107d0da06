"""Who saves which bytes: all of them once, and the rank that saves the most as little as can be."""

from __future__ import annotations

import random

import pytest

from evermoe.planning.save_shares import ALIGNMENT, save_shares


def drawn(seed):
    """A number of ranks, and (bytes, holders, whether it is an expert) of units."""
    draw = random.Random(seed)
    ranks = draw.randint(1, 6)
    every = tuple(range(ranks))
    units = []
    for _ in range(draw.randint(0, 30)):
        few, many = draw.randint(0, 10_000), draw.randint(0, 100_000)
        some = tuple(sorted(draw.sample(every, draw.randint(1, ranks))))
        units.append(draw.choice([(few, some, True), (few, some[:1], False), (many, every, False), (0, every, False)]))
    return ranks, units


@pytest.mark.parametrize("seed", range(200))
def test_each_byte_is_saved_once_by_a_rank_that_has_it(seed):
    ranks, units = drawn(seed)
    saved: dict[int, list[tuple[int, int]]] = {at: [] for at in range(len(units))}
    for rank, shares in enumerate(save_shares(*_columns(units), ranks)):
        for unit, start, end in shares:
            nbytes, holders, is_expert = units[unit]
            assert rank in holders
            assert (start, end) == (0, nbytes) or not (is_expert or len(holders) == 1 or start % ALIGNMENT)
            saved[unit].append((start, end))
    for (nbytes, _, _), parts in zip(units, map(sorted, saved.values()), strict=True):
        ends = [0, *(end for _, end in parts)]
        assert [start for start, _ in parts] == ends[:-1]
        assert ends[-1] == nbytes


@pytest.mark.parametrize("seed", range(200))
def test_nobody_saves_more_than_the_level_to_which_what_all_have_fills_the_ranks(seed):
    ranks, units = drawn(seed)
    saved = [sum(end - start for _, start, end in shares) for shares in save_shares(*_columns(units), ranks)]
    fixed = [unit for unit in units if unit[2] or len(unit[1]) == 1]
    alone = [sum(end - start for _, start, end in shares) for shares in save_shares(*_columns(fixed), ranks)]
    rest = sum(nbytes for nbytes, held, is_expert in units if not is_expert and len(held) > 1)
    level = max(alone)
    filled = sum(level - each for each in alone)
    level += max(0, -(-(rest - filled) // ranks))
    assert max(saved) < level + ALIGNMENT


def _columns(units):
    return [[unit[at] for unit in units] for at in range(3)]


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="expected as many of each, got 1, 2, 1"):
        save_shares([4], [[0], [0]], [False], 1)
