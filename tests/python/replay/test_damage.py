"""A replica uses no bit that is not its trainer's: each flip is found, at rest or by the trainer's digest."""

from itertools import pairwise

import pytest
import torch

from evermoe import optim
from evermoe._native import digest
from evermoe.copies.replay import calibrate
from evermoe.copies.replay.dispute import repeat_batch
from evermoe.copies.replay.part import sum_of_words
from evermoe.copies.replay.replica import Replica
from evermoe.copies.replay.sender import GradientSender, Row
from evermoe.copies.replay.source import take_digests
from evermoe.errors import ReplicaBehind
from evermoe.planning.protection import BATCH_STEPS
from evermoe.session.recorded_call import from_bytes, to_bytes

UNITS = 3
ELEMENTS = 1032
STEPS = 12
PASS = 32


class Pair:
    """A trainer of some rows, and their replica."""

    def __init__(self, *, keeps_disputes=False):
        torch.manual_seed(0)
        self.p = torch.nn.Parameter(torch.randn(UNITS, ELEMENTS))
        self.optimizer = optim.AdamW([self.p], lr=1e-2)
        self.sender = GradientSender(
            self.optimizer, {f"unit{index}": {"weights": Row(self.p, index)} for index in range(UNITS)}
        )
        self.replica = Replica(self.sender.layouts(), keeps_disputes=keeps_disputes)
        self.taken = -1

    def step(self):
        """Codes of what was received."""
        self.taken += 1
        self.p.grad = torch.randn_like(self.p)
        self.optimizer.step()
        return [self.receive(message).code for message in self.sender.messages(self.taken)]

    def receive(self, message):
        received = self.replica.receive(message)
        if received.needs_full_state:
            self.sender.request_full_state(received.unit)
        return received

    def prove(self):
        """The units that turn out to be damaged."""
        for message in self.sender.proofs(self.taken):
            self.receive(message)
        for index in range(UNITS):
            self.find(index)
        return [each.unit for each in self.replica.take_damages()]

    def differ(self):
        """The dispute after a comparison of all states, in which none is read."""
        for message in self.sender.proofs(self.taken):
            self.receive(message)
        for index, each in enumerate(self.replica._parts):
            with each.lock:
                while self.replica._repeater.apply_locked(index, self.taken):
                    pass
        return self.replica.dispute

    def find(self, index):
        """Whether there is the trainer's state of a unit."""
        try:
            caught = self.replica.catch_up(f"unit{index}")
        except ReplicaBehind:
            return False
        return torch.equal(caught.state[: 4 * ELEMENTS].view(torch.float32), self.p[index].detach())


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.replica.close()


@pytest.mark.parametrize("bit", [0, 7, 8 * 4 * ELEMENTS - 1, 8 * 12 * ELEMENTS + 31])
def test_each_flipped_bit_of_a_state_is_found_before_it_is_read(pair, bit):
    """Of weights, of moments, and of the count of steps."""
    pair.step()
    part = pair.replica._parts[1]
    with part.lock:
        part.state[bit // 8] ^= 1 << bit % 8
    assert [pair.find(index) for index in range(UNITS)] == [True, False, True]
    (damage,) = pair.replica.take_damages()
    assert (damage.unit, damage.step) == ("unit1", 0)
    assert "unit1/weights" in damage.reason
    assert pair.replica.take_damages() == []
    assert pair.step() == ["ok", "failed", "ok"]
    assert pair.step() == ["ok", "ok", "ok"]
    assert [pair.find(index) for index in range(UNITS)] == [True, True, True]


def test_flipped_bit_is_found_before_a_step_is_repeated(pair):
    for _ in range(STEPS // 2):
        pair.step()
    part = pair.replica._parts[2]
    with part.lock:
        part.state[77] ^= 1
    for _ in range(STEPS):
        pair.step()
    pair.find(2)  # the replica's thread may not have come to it yet
    for _ in range(2):
        pair.step()
    assert [pair.find(index) for index in range(UNITS)] == [True, True, True], "it has healed"
    assert [each.unit for each in pair.replica.take_damages()] == ["unit2"]


def test_step_that_was_repeated_wrongly_is_found_by_the_digest_of_the_trainer(pair):
    for _ in range(STEPS):
        pair.step()
    assert pair.prove() == []
    part = pair.replica._parts[0]
    with part.lock:
        part.state[77] ^= 1
        part.seal_state()
    pair.step()
    assert not pair.find(0)
    assert pair.replica.take_damages() == [], "no replica can know by itself"
    assert pair.prove() == ["unit0"]
    pair.step()
    assert pair.step() == ["ok"] * UNITS
    assert pair.find(0)
    assert pair.prove() == []


def test_proofs_take_turns_and_reach_every_unit(pair):
    pair.step()
    taken = [[] for _ in range(UNITS)]
    for call in range(4 * PASS):
        take_digests(pair.sender.turns.choose(PASS), pair.optimizer)
        for calls, source in zip(taken, pair.sender._sources, strict=True):
            if source.digest is not None:
                calls.append(call)
            source.digest = None
    firsts = []
    for calls in taken:
        first = set()
        for call in calls:
            first |= set() if call - BATCH_STEPS in first else {call}
        assert [after - before for before, after in pairwise(sorted(first))] == [PASS] * 3
        assert set(calls) - first == {call + BATCH_STEPS for call in first if call + BATCH_STEPS < 4 * PASS}
        firsts.append(first)
    assert len(set.union(*firsts)) == 4 * UNITS, "the first ones one at a time"


@pytest.mark.parametrize("wrong", ["trainer", "copy"])
@pytest.mark.parametrize("steps", [1, BATCH_STEPS])
@pytest.mark.parametrize("ends", ["verdict", "recovery", "trusted"])
def test_a_third_repeats_the_steps_since_both_had_the_same_state(wrong, steps, ends, monkeypatch):
    pair = Pair(keeps_disputes=True)
    with pair.replica:
        for _ in range(BATCH_STEPS):  # no more: the replica's thread repeats none of them
            pair.step()
        assert pair.prove() == []
        if wrong == "copy":
            monkeypatch.setattr(calibrate, "adamw_", lambda *args: args[0].add_(1e-3))
        for _ in range(steps):
            pair.step()
        if wrong == "trainer":
            pair.p.data[0, 5] += 1e-3
        dispute = pair.differ()
        assert (dispute.unit, dispute.part, dispute.step) == ("unit0", "unit0/weights", pair.taken)
        assert dispute.own != dispute.of_trainer
        monkeypatch.undo()
        record = from_bytes(to_bytes(dispute.batch.record()), torch.device("cpu"))
        repeated = repeat_batch(pair.sender.layouts()[0], dispute.part, record)
        assert repeated == (dispute.own if wrong == "trainer" else dispute.of_trainer)
        assert pair.replica.take_damages() == [], "the replica still has the state"
        if ends == "trusted":
            pair.replica.end_disputes(["unit0", "unit1", "unit2"])
            assert pair.replica.dispute is None
            assert digest(pair.replica.catch_up("unit0").state.numpy()) == pair.replica.catch_up("unit0").digest
            assert pair.differ() is None, "a trainer that is wrong has no say any more"
            return
        if ends == "verdict":
            pair.replica.end_disputes()
        assert not any(pair.find(index) for index in range(UNITS if wrong == "copy" else 1)), "it cannot be read"
        assert "unit0" in {each.unit for each in pair.replica.take_damages()}
        pair.step()
        pair.step()
        assert [pair.find(index) for index in range(UNITS)] == [True] * UNITS, "it has the trainer's state"


def test_nobody_can_repeat_the_steps_since_an_unknown_state():
    """The states parted before the first of the two digests."""
    pair = Pair(keeps_disputes=True)
    with pair.replica:
        pair.step()
        pair.find(0)
        pair.p.data[0, 5] += 1e-3
        for _ in range(3):
            pair.step()
        pair.find(0)
        pair.step()
        assert pair.differ().batch is None


def test_sum_of_words_knows_every_bit():
    state = torch.randint(0, 256, (24,), dtype=torch.uint8)
    for bits in (state, state[:23]):
        intact = sum_of_words(bits)
        for bit in range(8 * len(bits)):
            bits[bit // 8] ^= 1 << bit % 8
            assert sum_of_words(bits) != intact
            bits[bit // 8] ^= 1 << bit % 8
