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


def test_experts_keep_their_numbers_whichever_come_and_go():
    for before, after in itertools.product(subsets(), repeat=2):
        memories = StackMemories()
        old = memories.restack("x", stack_of(before), [(row, row) for row in range(len(before))], len(before), EXPERTS)
        kept = [(to, before.index(expert)) for to, expert in enumerate(after) if expert in before]
        new = memories.restack("x", old, kept, len(after), EXPERTS)
        assert new.shape == (len(after), LENGTH)
        for to, _ in kept:
            assert (new[to] == after[to]).all(), (before, after)
        if before and after:
            assert new.data_ptr() == old.data_ptr()
            assert new.untyped_storage().nbytes() == new.nbytes, "who saves or copies it takes the rows alone"


def test_experts_that_stand_in_another_order_are_put_into_other_memory():
    memories = StackMemories()
    old = memories.restack("x", stack_of([3, 1]), [(0, 0), (1, 1)], 2, EXPERTS)
    new = memories.restack("x", old, [(0, 1), (1, 0)], 2, EXPERTS)
    assert torch.equal(new, stack_of([1, 3]))
    assert torch.equal(old, stack_of([3, 1]))


def test_a_stack_that_has_been_replaced_leaves_the_memory_to_who_has_it():
    memories = StackMemories()
    old = memories.restack("x", stack_of([3, 1]), [(0, 0), (1, 1)], 2, EXPERTS)
    new = memories.restack("x", stack_of([4, 0]), [(0, 0)], 1, EXPERTS)
    assert torch.equal(new, stack_of([4]))
    assert torch.equal(old, stack_of([3, 1]))


def resident(address):
    """Bytes of the mapping there that are in memory."""
    found = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            found = int(span[1], 16) <= address < int(span[2], 16)
        elif found and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("nothing is mapped there")


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="memory is looked up as Linux tells it")
def test_rows_take_memory_from_when_they_come_until_they_go():
    memory = StackMemory(64, HUGE_PAGE_BYTES)
    like = torch.empty(1, HUGE_PAGE_BYTES // 4)
    first = memory.stack(2, like).fill_(1)
    before = resident(first.data_ptr())
    assert before <= 4 * HUGE_PAGE_BYTES
    memory.stack(64, like).fill_(1)
    assert resident(first.data_ptr()) >= 60 * HUGE_PAGE_BYTES
    memory.free_after(first.nbytes)
    assert resident(first.data_ptr()) <= before
    assert (first == 1).all()


def test_optimizer_state_and_weights_of_experts_stay_where_they_are_as_others_come():
    layer = evermoe.MoE(4, 6, EXPERTS)
    state = TrainingState(layer, evermoe.optim.AdamW(layer.parameters()))
    (path,) = state.layers
    names = [expert_unit(path, expert) for expert in range(EXPERTS)]
    every = {}
    for name in names:
        every[name] = torch.empty(state.catalog.by_name[name].nbytes, dtype=torch.uint8)
        state.read(name, every[name])

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
