"""Packing, mixtures and shuffling: independent oracles, and exact states."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from evermoe.data import Mixture, Packed, Shuffled
from evermoe.process.seeds import seed_all, seeded
from support.resuming import check_resuming, opened, plain, state_of


class Stream(IterableDataset):
    """Items with a state, in another order in each epoch; counts those that it reads."""

    read = 0

    def __init__(self, items):
        self.items, self.epoch, self.at, self.start = list(items), 0, 0, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.start = state["at"]

    def __iter__(self):
        order = random.Random(self.epoch).sample(self.items, len(self.items))
        self.at, self.start = self.start, 0
        for item in order[self.at :]:
            self.at += 1
            Stream.read += 1
            yield item


class Plain:
    """The same items without a state, which can only be read from the start."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        return iter(self.items)


class Noisy:
    """Adds to each item what the global generators draw."""

    def __init__(self, items):
        self.items = items

    def __iter__(self):
        for item in self.items:
            yield item, random.random(), np.random.rand(), torch.rand(()).item()


def documents(seed, count=25, longest=40):
    draw = random.Random(seed)
    lengths = [draw.choice([0, 1, 2, draw.randint(1, longest)]) for _ in range(count)]
    tokens = itertools.count(1)
    return [list(itertools.islice(tokens, length)) for length in lengths]


KINDS = {"state": Stream, "none": Plain, "by index": list}
kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("options", [{}, {"pad_id": 0}, {"split": False}, {"split": False, "pad_id": 0}], ids=str)
@pytest.mark.parametrize("length", [3, 16])
def test_packed_documents_resume_after_each_sequence(kind, options, length):
    given = documents(0, 10, longest=20)
    check_resuming(lambda: Packed(KINDS[kind](given), length, **options))


@pytest.mark.parametrize("length", [1, 5, 16, 64])
@pytest.mark.parametrize("pad_id", [None, -7])
def test_split_sequences_are_the_documents_one_after_another(length, pad_id):
    given = documents(3)
    tokens = [token for document in given for token in document]
    firsts = {document[0] for document in given if document}
    found = list(Packed(given, length, pad_id=pad_id))
    full, rest = divmod(len(tokens), length)
    assert len(found) == full + (pad_id is not None and rest > 0)
    packed = torch.cat([each["input_ids"] for each in found]).tolist()
    assert packed[: full * length] == tokens[: full * length]
    if pad_id is not None:
        assert packed[len(tokens) :] == [pad_id] * (len(packed) - len(tokens))
    for each in found:
        assert {name: value.shape for name, value in each.items()} == dict.fromkeys(each, (length,))
        position = 0
        for index, (token, label, place) in enumerate(zip(*map(torch.Tensor.tolist, each.values()), strict=True)):
            is_first = index == 0 or token in firsts or (token == pad_id and each["input_ids"][index - 1] != pad_id)
            position = 0 if is_first else position + 1
            assert place == position
            assert label == (-100 if is_first or token == pad_id else token)


@pytest.mark.parametrize("length", [5, 16, 64])
def test_sequences_that_are_not_split_have_complete_documents_up_to_a_budget_of_tokens(length):
    given = [document for document in documents(4) if document]
    parts = [document[at : at + length] for document in given for at in range(0, len(document), length)]
    found = [plain(each) for each in Packed(given, length, split=False)]
    starts = [[at for at, place in enumerate(each["position_ids"]) if place == 0] for each in found]
    pieces = []
    for each, begins in zip(found, starts, strict=True):
        pieces.append([each["input_ids"][a:b] for a, b in zip(begins, [*begins[1:], None], strict=True)])
        assert len(each["input_ids"]) <= length
    assert list(itertools.chain(*pieces)) == parts
    for each, following in itertools.pairwise(pieces):
        assert sum(map(len, each)) + len(following[0]) > length, "the next document would have fitted"
    padded = list(Packed(given, length, split=False, pad_id=0))
    assert [plain(each)["input_ids"] for each in padded] == [
        each["input_ids"] + [0] * (length - len(each["input_ids"])) for each in found
    ]


def test_documents_have_what_the_collator_of_transformers_gives():
    from transformers import DataCollatorWithFlattening

    given = [{"input_ids": [1, 2, 3], "labels": [-100, 5, 6]}, {"input_ids": [7]}, {"input_ids": [8, 9]}]
    given = [{"labels": each["input_ids"], **each} for each in given]
    theirs = DataCollatorWithFlattening()(given)
    (ours,) = Packed(given, length=6)
    for name in ("input_ids", "labels", "position_ids"):
        assert ours[name].tolist() == theirs[name][0].tolist(), name


def test_a_long_document_is_read_again_and_not_in_the_state():
    given = [list(range(10_000)), [1, 2, 3]]
    made = opened(lambda: Packed(Stream(given), 10), 0)
    list(itertools.islice(made, 500))
    state = state_of(made)
    assert len(str(state)) < 200
    Stream.read = 0
    next(iter(opened(lambda: Packed(Stream(given), 10), 0, state)))
    assert Stream.read <= 2


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("text", r"document 1 to be a sequence of token numbers.*got str"),
        ([0.5], "got list of float64"),
        ([[1, 2]], "with 2 dimensions"),
        ({"text": "a"}, "document 1 to have input_ids.*got text"),
        ({"input_ids": [1, 2], "labels": [1]}, "got 2 tokens and 1 labels"),
    ],
)
def test_a_document_without_tokens_is_named(document, message):
    with pytest.raises(ValueError, match=message):
        list(Packed([[1], document], 4))


@kinds
@pytest.mark.parametrize("buffer_size", [1, 3, 50])
@pytest.mark.parametrize("count", [0, 1, 6, 13])
def test_shuffled_items_resume_after_each(kind, buffer_size, count):
    (first, second) = check_resuming(lambda: Shuffled(KINDS[kind](range(count)), buffer_size))
    assert sorted(first) == sorted(second) == list(range(count))
    if count == 13 and buffer_size > 2:
        assert first != second and first != sorted(first)


def test_items_stay_in_their_block_and_each_is_read_once():
    Stream.read = 0
    made = opened(lambda: Shuffled(Plain(range(100)), 10), 0)
    found = list(made)
    for number, start in enumerate(range(0, 100, 10)):
        assert sorted(found[start : start + 10]) == list(range(start, start + 10)), number
    orders = {tuple(item % 10 for item in found[start : start + 10]) for start in range(0, 100, 10)}
    assert len(orders) == 10, "each block has an order of its own"


def test_reading_ahead_is_spread_over_the_items():
    Stream.read = 0
    iterator = iter(Shuffled(Stream(range(1000)), 100))
    read = []
    for _ in range(250):
        next(iterator)
        read.append(Stream.read)
    assert read[0] == 101
    assert max(after - before for before, after in itertools.pairwise(read)) <= 1


def test_a_state_costs_at_most_two_blocks_of_reading():
    made = opened(lambda: Shuffled(Stream(range(1000)), 20), 0)
    list(itertools.islice(made, 519))
    state = state_of(made)
    Stream.read = 0
    next(iter(opened(lambda: Shuffled(Stream(range(1000)), 20), 0, state)))
    assert Stream.read <= 21


def test_a_mixture_continues_from_the_states_of_its_sources():
    def make():
        return Mixture([Stream(range(200)), Stream(range(200))])

    made = opened(make, 0)
    list(itertools.islice(made, 100))
    state = state_of(made)
    Stream.read = 0
    next(iter(opened(make, 0, state)))
    assert Stream.read == 1


def test_the_state_of_documents_is_taken_once_for_each_sequence():
    class Counted(Stream):
        taken = 0

        def state_dict(self):
            Counted.taken += 1
            return super().state_dict()

    sequences = len(list(Packed(Counted([[1, 2]] * 100), 20)))
    assert sequences == 10 and Counted.taken <= sequences + 1


STRATEGIES = ["first_exhausted", "all_exhausted", "all_exhausted_without_replacement"]


def labelled(kind, lengths):
    return [
        KINDS[kind]([f"{name}{number}" for number in range(length)])
        for name, length in zip("abcd", lengths, strict=False)
    ]


@kinds
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lengths", [(2, 5, 1), (0, 3), (0, 0)], ids=str)
def test_mixtures_resume_after_each_item(kind, strategy, lengths):
    weights = [0.5, 0.3, 0.2][: len(lengths)]
    check_resuming(lambda: Mixture(labelled(kind, lengths), weights=weights, stopping_strategy=strategy))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mixtures_end_by_their_strategy(strategy):
    for seed in range(20):
        lengths = random.Random(seed).choices(range(1, 9), k=3)
        sources = labelled("none", lengths)
        torch.manual_seed(seed)
        found = list(Mixture(sources, weights=[3, 1, 1], stopping_strategy=strategy))
        counts = Counter(item[0] for item in found)
        for name, length in zip("abc", lengths, strict=True):
            own = [item for item in found if item[0] == name]
            assert own == [f"{name}{number % length}" for number in range(counts[name])], "in order, again and again"
        is_over = [counts[name] >= length for name, length in zip("abc", lengths, strict=True)]
        if strategy == "first_exhausted":
            assert any(is_over) and all(counts[name] <= length for name, length in zip("abc", lengths, strict=True))
        elif strategy == "all_exhausted":
            assert all(is_over)
            assert any(counts[name] == length for name, length in zip("abc", lengths, strict=True))
        else:
            assert [counts[name] for name in "abc"] == lengths


def test_weights_are_those_of_the_draws_and_may_change():
    ends = [itertools.repeat(0), itertools.repeat(1), itertools.repeat(2)]
    with seeded(0):
        found = list(itertools.islice(Mixture(ends, weights=[6, 3, 1]), 10_000))
    assert np.bincount(found) / 10_000 == pytest.approx([0.6, 0.3, 0.1], abs=0.02)
    with seeded(0):
        changing = list(itertools.islice(Mixture(ends, weights=lambda n: [6, 3, 1] if n < 2000 else [0, 0, 2]), 2500))
    assert changing[:2000] == found[:2000] and set(changing[2000:]) == {2}


def test_a_pass_of_a_source_has_an_epoch_of_its_own():
    made = opened(lambda: Mixture([Stream(range(5)), Stream(range(100, 140))], stopping_strategy="all_exhausted"), 0)
    own = [item for item in made if item < 5]
    orders = {tuple(own[at : at + 5]) for at in range(0, len(own) - 4, 5)}
    assert len(orders) > 1 and all(sorted(order) == list(range(5)) for order in orders)


@pytest.mark.parametrize("weights", [[1], [1, -1], [0, 0], [1, float("nan")], lambda _: [1, 2, 3]])
def test_wrong_weights_are_named(weights):
    with pytest.raises(ValueError, match="expected a weight of at least 0 for each of the 2 sources"):
        next(iter(Mixture([[1], [2]], weights=weights)))


def nested(seed):
    web = Shuffled(Stream(documents(seed, 20, 20)), 4)
    code = Noisy(documents(seed + 1, 15, 20))
    mixed = Mixture([web, [document for document, *_ in code]], weights=[2, 1], stopping_strategy="all_exhausted")
    return Packed(mixed, 16)


def test_what_is_made_of_each_other_resumes():
    (first, second) = check_resuming(lambda: nested(0))
    assert len(first) > 10 and first != second


@pytest.mark.parametrize(
    "make", [lambda items: Shuffled(items, 4), lambda items: Mixture([items, items]), lambda items: items]
)
def test_what_sources_draw_is_the_same_when_they_are_read_again(make):
    class Augmented(Noisy, IterableDataset):
        """Draws around an iterable, and has its state."""

        def __init__(self):
            super().__init__(Shuffled(make(Noisy(range(20))), 3))
            self.state_dict, self.load_state_dict = self.items.state_dict, self.items.load_state_dict

    def read(state=None, count=None):
        found, made = [], opened(Augmented, 0, state)
        start = 0 if state is None else state["number"]
        with seeded(5):
            iterator = iter(made)
            for number in itertools.count(start):
                seed_all(7, number)  # as a reader does
                item = next(iterator, None)
                if item is None or number == count:
                    return (found, state_of(made)) if item is None else (found, state)
                found.append(item)
                state = state_of(made)

    expected, _ = read()
    assert len(expected) >= 20
    for count in range(1, len(expected)):
        begun, state = read(count=count)
        assert begun + read(state)[0] == expected


def test_generators_of_a_script_stay_as_they_are():
    iterator = iter(Packed(Noisy([]), 2))
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    for made in (iterator, iter(Packed([[1, 2, 3]] * 9, 2))):
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
        list(made)
        assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


def test_reading_in_a_step_leaves_what_the_step_draws():
    """A session seeds each step by its rank: dropout must not follow the data, which may be the same for all ranks."""
    with seeded(0, 5, 1):
        expected = torch.rand(3)
    items = iter(Shuffled(range(20), 4))
    with seeded(0, 5, 1):
        next(items)
        assert torch.equal(torch.rand(3), expected)


def test_epochs_of_one_object_each_have_all_items_also_after_a_resume():
    made = Shuffled(Stream(range(10)), 4)
    list(itertools.islice(made, 6))
    state = made.state_dict()
    resumed = Shuffled(Stream(range(10)), 4)
    resumed.load_state_dict(state)
    assert len(list(resumed)) == 4
    for epoch in (0, 1):
        resumed.set_epoch(epoch)
        assert sorted(resumed) == list(range(10))


def test_torchs_loader_reads_them():
    loader = DataLoader(Packed(documents(0), 8), batch_size=3, drop_last=True)
    batches = list(loader)
    assert batches and all(batch["input_ids"].shape == (3, 8) for batch in batches)


def test_a_source_that_has_changed_is_named():
    made = opened(lambda: Packed(Plain([[1, 2, 3]] * 9), 2), 0)
    list(itertools.islice(made, 12))
    resumed = Packed(Plain([[1, 2, 3]] * 4), 2)
    resumed.load_state_dict(state_of(made))
    with pytest.raises(ValueError, match=r"expected the 8 items that Plain had before, and it has 4"):
        iter(resumed)


class Sized(IterableDataset):
    """A stream that knows its length; torch's class has a `__getitem__` that raises."""

    def __len__(self):
        return 7

    def __iter__(self):
        return iter(range(7))


def test_a_stream_with_a_length_is_iterated():
    assert sorted(Shuffled(Sized(), 3)) == list(range(7))
    check_resuming(lambda: Mixture([Sized(), Stream(range(5))], stopping_strategy="all_exhausted"))


@pytest.mark.parametrize(
    "make",
    [
        lambda stream: Mixture([stream, stream]),
        lambda stream: Mixture([Shuffled(stream, 2), Packed(stream, 4)]),
        lambda stream: Mixture([stream, Mixture([[], Shuffled(stream, 2)])]),
    ],
)
def test_one_stream_as_two_sources_is_refused(make):
    with pytest.raises(ValueError, match="got the same Stream twice: it has one state"):
        make(Stream(range(5)))
    items = [1, 2]  # without a state
    mixed = Mixture([items, items], stopping_strategy="all_exhausted_without_replacement")
    assert sorted(mixed) == [1, 1, 2, 2]
