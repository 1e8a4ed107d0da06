"""A replica uses no bit that is not its trainer's: each flip is found, at rest or by the trainer's digest."""

import pytest
import torch

from evermoe import optim
from evermoe.copies.replay.part import sum_of_words
from evermoe.copies.replay.replica import Replica
from evermoe.copies.replay.sender import GradientSender, Row
from evermoe.copies.replay.source import take_digests
from evermoe.errors import ReplicaBehind

UNITS = 3
ELEMENTS = 1032
STEPS = 12


class Pair:
    """A trainer of some rows, and their replica."""

    def __init__(self):
        torch.manual_seed(0)
        self.p = torch.nn.Parameter(torch.randn(UNITS, ELEMENTS))
        self.optimizer = optim.AdamW([self.p], lr=1e-2)
        self.sender = GradientSender(
            self.optimizer, {f"unit{index}": {"weights": Row(self.p, index)} for index in range(UNITS)}
        )
        self.replica = Replica(self.sender.layouts())
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
    taken = [0] * UNITS
    for _ in range(4 * UNITS):
        take_digests(pair.sender.next_digests(2 * UNITS), pair.optimizer)
        found = [source.digest is not None for source in pair.sender._sources]
        assert sum(found) <= 1
        taken = [count + one for count, one in zip(taken, found, strict=True)]
        for source in pair.sender._sources:
            source.digest = None
    assert taken == [2] * UNITS


def test_sum_of_words_knows_every_bit():
    state = torch.randint(0, 256, (24,), dtype=torch.uint8)
    for bits in (state, state[:23]):
        intact = sum_of_words(bits)
        for bit in range(8 * len(bits)):
            bits[bit // 8] ^= 1 << bit % 8
            assert sum_of_words(bits) != intact
            bits[bit // 8] ^= 1 << bit % 8
