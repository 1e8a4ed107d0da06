"""Stacks of experts whose rows come and go in place."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch

import evermoe
from evermoe.profile.memory import HUGE_PAGE_BYTES
from evermoe.state.stack_memory import StackMemories, StackMemory
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import expert_unit

EXPERTS, LENGTH = 5, 8


def stack_of(experts):
    """Row i is full of the number of its expert."""
    return torch.tensor(experts, dtype=torch.float32).view(-1, 1).expand(-1, LENGTH).contiguous()


def subsets():
    every = range(EXPERTS)
    return [list(found) for size in range(EXPERTS + 1) for found in itertools.combinations(every, size)]


def restack(memories, old, kept, rows, leaving=()):
    return memories.restack("x", old, kept, rows, EXPERTS, leaving)


def placed(memories, experts):
    return restack(memories, stack_of(experts), [(row, row) for row in range(len(experts))], len(experts))[0]


def test_experts_keep_their_numbers_whichever_come_and_go():
    for before, after in itertools.product(subsets(), repeat=2):
        memories = StackMemories()
        old = placed(memories, before)
        kept = [(to, before.index(expert)) for to, expert in enumerate(after) if expert in before]
        leaving = [row for row, expert in enumerate(before) if expert not in after]
        new, left = restack(memories, old, kept, len(after), leaving)
        assert new.shape == (len(after), LENGTH)
        coming = [to for to, expert in enumerate(after) if expert not in before]
        new[coming] = -1.0  # what was in it goes
        for to, _ in kept:
            assert (new[to] == after[to]).all(), (before, after)
        for row, data in zip(leaving, left, strict=True):
            assert (data == before[row]).all(), (before, after)
        if before and after:
            assert new.data_ptr() == old.data_ptr()
            assert new.untyped_storage().nbytes() == new.nbytes, "who saves or copies it takes the rows alone"


def test_experts_that_stand_in_another_order_change_places():
    for order in itertools.permutations(range(4)):
        memories = StackMemories()
        old = placed(memories, [3, 1, 0, 2])
        new, _ = restack(memories, old, [(to, row) for to, row in enumerate(order)], 4)
        assert torch.equal(new, stack_of([[3, 1, 0, 2][row] for row in order]))
        assert new.data_ptr() == old.data_ptr()


def test_a_stack_that_has_been_replaced_leaves_the_memory_to_who_has_it():
    memories = StackMemories()
    old = placed(memories, [3, 1])
    new, (left,) = restack(memories, stack_of([4, 0]), [(0, 0)], 1, [1])
    assert torch.equal(new, stack_of([4]))
    assert torch.equal(old, stack_of([3, 1]))
    assert (left == 0).all()


def resident(address):
    """Bytes of the mapping there that are in memory."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            found = int(span[1], 16) <= address < int(span[2], 16)
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("nothing is mapped at that address")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="memory is looked up as Linux reports it")
def test_rows_take_memory_from_when_they_come_until_they_go():
    memory = StackMemory(64, HUGE_PAGE_BYTES)
    like = torch.empty(1, HUGE_PAGE_BYTES // 4)
    first = memory.stack(2, like).fill_(1)
    before = resident(first.data_ptr())
    assert before <= 4 * HUGE_PAGE_BYTES
    memory.stack(64, like).fill_(1)
    assert resident(first.data_ptr()) >= 60 * HUGE_PAGE_BYTES
    memory.used_bytes = first.nbytes
    memory.free_unused()
    assert resident(first.data_ptr()) <= before
    assert (first == 1).all()


def trained_layer():
    """The state of a layer, its path, the names of its experts, and the bytes of each, no two of which are equal."""
    layer = evermoe.MoE(4, 6, EXPERTS)
    state = TrainingState(layer, evermoe.optim.AdamW(layer.parameters()))
    (path,) = state.layers
    names = [expert_unit(path, expert) for expert in range(EXPERTS)]
    every = {}
    for expert, (name, tensors) in enumerate(zip(names, state.tensors(names), strict=True)):
        for number, tensor in enumerate(tensors[:-1]):  # the last one is the count of all
            tensor.fill_(expert + number / 4)
        every[name] = torch.empty(state.catalog.by_name[name].nbytes, dtype=torch.uint8)
        state.read(name, every[name])
    return state, path, names, every


def test_optimizer_state_and_weights_of_experts_stay_where_they_are_as_others_come():
    state, path, names, every = trained_layer()

    def addresses():
        stacks = state.tensors(names[:2])
        return [tensor.data_ptr() for unit in stacks for tensor in unit]

    state.adopt({path: [0, 1, 3]}, {})
    before = addresses()
    for ids in ([0, 1, 2, 3, 4], [0, 1], [0, 1, 4]):
        missing = {names[expert] for expert in ids} - set(state.held())
        state.adopt({path: ids}, {name: every[name].clone() for name in missing})
        assert addresses() == before
        for expert in ids:
            data = torch.empty_like(every[names[expert]])
            state.read(names[expert], data)
            assert torch.equal(data, every[names[expert]])


def test_what_leaves_stays_behind_the_stacks_and_out_of_the_way_of_the_next_recovery():
    state, path, names, every = trained_layer()

    def retained():
        return {each.unit: each.data for each in state.retained.stored(1)}

    state.adopt({path: [0, 1, 2, 3]}, {})
    state.retained.begin(1, set())
    state.adopt({path: [0, 2]}, {}, leaving=dict.fromkeys([names[1], names[3]], 0))
    first = state.layers[path].weights.data_ptr()
    for step in range(2):
        assert retained().keys() == {names[1], names[3]}
        assert all(torch.equal(data, every[name]) for name, data in retained().items()), step
        state.adopt({path: [0, 2, 4]}, {names[4]: every[names[4]].clone()})  # before anything is released
        assert state.layers[path].weights.data_ptr() == first
    state.retained.release()
    assert not retained()
