"""Arenas that are page-locked, and the warning where one cannot be."""

import warnings
from types import SimpleNamespace

import pytest
import torch

from evermoe.copies.snapshot.bundles import Bundle
from evermoe.copies.snapshot.page_locks import MIN_BYTES, PageLocks
from evermoe.profile import memory


class Arena:
    """Counts how often it is locked, and refuses if told to."""

    mapped_bytes = 1000

    def __init__(self, refusal=None):
        self.refusal, self.devices = refusal, []

    def page_lock(self, device):
        self.devices.append(device)
        if self.refusal:
            raise RuntimeError(self.refusal)


def tensor(nbytes, is_cuda=True):
    device = torch.device("cuda", 1) if is_cuda else torch.device("cpu")
    return SimpleNamespace(nbytes=nbytes, is_cuda=is_cuda, device=device)


LARGE = [tensor(4, is_cuda=False), tensor(4 * MIN_BYTES)]
SMALL = [tensor(4), tensor(MIN_BYTES)]
ON_CPU = [tensor(9 * MIN_BYTES, is_cuda=False)]


def store_of(*bundles):
    """A store whose own bundles have these (tensors, arena)."""
    by_unit = {str(number): tensors for number, (tensors, _) in enumerate(bundles)}
    own = [
        SimpleNamespace(bundle=Bundle((0,), (str(number),)), arena=arena) for number, (_, arena) in enumerate(bundles)
    ]
    return SimpleNamespace(own=own, state=SimpleNamespace(tensors=lambda units: [by_unit[unit] for unit in units]))


def test_only_what_a_gpu_sends_in_large_pieces_is_locked():
    arenas = [Arena(), Arena(), Arena(), Arena()]
    store = store_of(*zip([LARGE, SMALL, ON_CPU, LARGE], arenas, strict=True))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PageLocks().lock(store, None) == 2000
        assert PageLocks().lock(store_of((ON_CPU, Arena())), 0) == 0
    assert [arena.devices for arena in arenas] == [[1], [], [], [1]]


def test_members_of_a_node_share_its_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_host_bytes", lambda: 100)
    assert [memory.share_of_host_bytes(["a", "b", "a", "a"], rank) for rank in range(4)] == [33, 100, 33, 33]
    monkeypatch.setattr(memory, "free_host_bytes", lambda: None)
    assert memory.share_of_host_bytes(["a"], 0) is None


def test_a_member_locks_no_more_than_its_share():
    arenas = [Arena(), Arena(), Arena()]
    with pytest.warns(
        UserWarning, match=r"1000 bytes.*with 2000 bytes before, this member's share.*is 2999.*ulimit -l"
    ):
        assert PageLocks().lock(store_of(*((LARGE, arena) for arena in arenas)), 2999) == 2000
    assert arenas[2].devices == []


def test_a_refusal_is_logged_once_with_its_reason_and_a_cure():
    locks = PageLocks()
    with pytest.warns(UserWarning, match=r"cuMemHostRegister of 1000 bytes failed: no.*ulimit -l.*memlock=-1") as told:
        for _ in range(2):
            store = store_of((LARGE, Arena("CUDA: cuMemHostRegister of 1000 bytes failed: no")), (LARGE, Arena()))
            assert locks.lock(store, None) == 0
            assert store.own[1].arena.devices == []
    assert len(told) == 1
