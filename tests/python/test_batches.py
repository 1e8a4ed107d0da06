"""Batches of every structure: what members get of one is the batch, and what has two readings is refused."""

import collections
import itertools
import json
import random
import types
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.utils.rnn import pack_sequence, unpack_sequence
from torch.utils.data import DataLoader, TensorDataset
from transformers import BatchEncoding, DataCollatorWithPadding, PreTrainedTokenizerFast

from evermoe import ElasticLoader
from evermoe.data.plain_state import from_json, to_json
from evermoe.data.sampler import Share

N = 7
X, Y = torch.arange(3.0 * N).view(N, 3), torch.arange(N)
RAGGED = [torch.arange(1 + i % 3) for i in range(N)]
NAMES = [f"sample {i}" for i in range(N)]


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True)
class Fields:
    x: torch.Tensor
    names: list
    rate: float = 0.5
    more: dict = field(default_factory=dict)


class Own(collections.UserDict):
    """A mapping with an attribute."""

    def __init__(self, data, source="web"):
        super().__init__(data)
        self.source = source


def tokenizer():
    words = {word: i for i, word in enumerate(["[PAD]", "a", "b", "c"])}
    made = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]")


def padded():
    """As a padding collator of transformers makes it."""
    encode = tokenizer()
    samples = [encode(" ".join("abc"[: 1 + i % 3])) for i in range(N)]
    return DataCollatorWithPadding(encode)(samples)


def rows(*columns):
    """The samples of columns, as plain values."""
    return list(zip(*([np.asarray(row).tolist() for row in column] for column in columns), strict=True))


def of_mapping(batch):
    return rows(*batch.values())


BATCHES = {
    "tensor": (lambda: X, rows),
    "array": (X.numpy, rows),
    "strings": (lambda: NAMES, rows),
    "dicts of samples": (
        lambda: [{"x": x, "y": int(y)} for x, y in zip(X, Y, strict=True)],
        lambda batch: [(each["x"].tolist(), each["y"]) for each in batch],
    ),
    "samples of different lengths": (lambda: RAGGED, rows),
    "pairs of samples": (
        lambda: list(zip(X, RAGGED, strict=True)),
        lambda batch: [(x.tolist(), y.tolist()) for x, y in batch],
    ),
    "lists of numbers": (lambda: [list(range(1 + i % 3)) for i in range(N)], rows),
    "default_collate": (lambda: [X, Y], lambda batch: rows(*batch)),
    "tuple": (lambda: (X, Y, 0.5, None), lambda batch: rows(*batch[:2], [batch[2:]] * len(batch[0]))),
    "tuple of a dict and a tensor": (
        lambda: ({"x": X, "mask": X > 3}, Y),
        lambda batch: rows(batch[0]["x"], batch[0]["mask"], batch[1]),
    ),
    "columns of samples": (lambda: (tuple(RAGGED), tuple(NAMES)), lambda batch: rows(*batch)),
    "named tuple": (lambda: Pair(X, Y), lambda batch: rows(batch.x, batch.y)),
    "dict": (
        lambda: {"x": X, "y": Y.numpy(), "names": NAMES, "rate": 3.0, "size": (224, 224), "scale": torch.tensor(2)},
        lambda batch: rows(
            batch["x"],
            batch["y"],
            batch["names"],
            [(batch["rate"], *batch["size"], int(batch["scale"]))] * len(batch["y"]),
        ),
    ),
    "views": (lambda: {"views": [X, X + 1], "y": Y}, lambda batch: rows(*batch["views"], batch["y"])),
    "nested": (
        lambda: {"a": {"b": [X, (Y, X.numpy())]}, "names": NAMES, "none": None},
        lambda batch: rows(batch["a"]["b"][0], *batch["a"]["b"][1], batch["names"]),
    ),
    "mapping proxy": (lambda: types.MappingProxyType({"x": X, "y": Y}), of_mapping),
    "ordered": (lambda: collections.OrderedDict(x=X, y=Y), of_mapping),
    "UserDict": (
        lambda: Own({"x": X, "y": Y}, "books"),
        lambda batch: rows(*batch.values(), [batch.source] * len(batch["x"])),
    ),
    "BatchEncoding": (
        lambda: BatchEncoding({"input_ids": X, "attention_mask": X.numpy(), "length": list(range(N))}),
        of_mapping,
    ),
    "tokenized": (
        lambda: tokenizer()(["a b c", "b"] * 3 + ["c"], padding=True, return_tensors="np"),
        lambda batch: rows(*batch.values(), [each.tokens for each in batch.encodings]),
    ),
    "padding collator": (padded, of_mapping),
    "dataclass": (
        lambda: Fields(X, NAMES, 0.25, {"y": Y}),
        lambda batch: rows(batch.x, batch.names, [batch.rate] * len(batch.x), batch.more["y"]),
    ),
    "packed": (lambda: pack_sequence(RAGGED, enforce_sorted=False), lambda batch: rows(unpack_sequence(batch))),
    "nested tensor": (
        lambda: torch.nested.nested_tensor([row.float() for row in RAGGED], layout=torch.jagged),
        lambda batch: rows(batch.unbind()),
    ),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_parts_of_all_members_are_the_batch(kind):
    """For one member to more than there are samples, and for the micro-batches of each."""
    make, samples_of = BATCHES[kind]
    batch = make()
    expected = samples_of(make())
    assert len(expected) == N
    loader = ElasticLoader([batch, make()], batch_size=N)
    for size in (*range(1, 6), N + 2):
        shares = [share for share in (loader.share(rank, size) for rank in range(size)) if share.weight]
        assert all(type(share.samples) is type(batch) for share in shares)
        found = [samples_of(share.samples) for share in shares]
        assert [len(each) for each in found] == [len(share.indices) for share in shares]
        assert list(itertools.chain(*found)) == expected
        for n in (1, 2, 3):
            parts = [part for share in shares for part in share.parts(n) if part.weight]
            assert list(itertools.chain(*(samples_of(part.samples) for part in parts))) == expected
    assert samples_of(batch) == expected, "the batch itself stays as it is"
    loader.advance()
    assert loader.consumed == N


@pytest.mark.parametrize("kind", BATCHES)
def test_samples_of_a_share_of_ones_own_are_divided_the_same_way(kind):
    make, samples_of = BATCHES[kind]
    share = Share(torch.arange(N), 1.0, make())
    assert list(itertools.chain(*(samples_of(part.samples) for part in share.parts(3)))) == samples_of(make())


@pytest.mark.parametrize("sizes", [(8, 8, 3), (2,), (9, 9, 2)])
def test_torchs_loader_gives_rows(sizes):
    """Also when the last batch has as many samples as there are fields."""
    total = sum(sizes)
    x, y = torch.randn(total, 3), torch.randn(total, 3)
    loader = ElasticLoader(DataLoader(TensorDataset(x, y), batch_size=sizes[0]))
    consumed = 0
    for size in sizes:
        parts = [loader.share(rank, 2) for rank in range(2)]
        found = [torch.cat([part.samples[column] for part in parts if part.weight]) for column in range(2)]
        assert torch.equal(found[0], x[consumed : consumed + size])
        assert torch.equal(found[1], y[consumed : consumed + size])
        loader.advance()
        consumed += size
        assert loader.consumed == consumed


def test_samples_as_a_list_are_entries():
    x = torch.randn(11, 5)
    loader = ElasticLoader(
        DataLoader(TensorDataset(x), batch_size=4, collate_fn=lambda batch: [each[0] for each in batch])
    )
    for length in (4, 4, 3):
        assert [len(loader.share(rank, 2).samples) for rank in range(2)] == [length // 2, length - length // 2]
        loader.advance()
    assert loader.consumed == 11


def test_a_new_process_reads_a_short_batch_as_earlier_ones():
    """Three samples of three numbers: rows of a list with three fields, or its entries."""
    batches = [[torch.zeros(6, 3)] * 3, [torch.zeros(3, 3)] * 3]
    first = ElasticLoader(batches, batch_size=6)
    first.batch()
    first.advance()
    assert first.share(0, 1).samples[0].shape == (3, 3)
    second = ElasticLoader(batches, batch_size=6)
    second.load_state_dict(first.state_dict())
    assert len(second.share(0, 3).samples) == 3
    second.advance()
    assert second.consumed == 9
    with pytest.raises(
        ValueError, match="may be read as a batch of 3 samples, with fields in the list at the top or 3"
    ):
        ElasticLoader(batches[1:], batch_size=6).batch()


@pytest.mark.parametrize(
    ("batch", "words"),
    {
        "two fields or two samples": (
            [X[:2], X[:2]],
            "may be read as a batch of 2 samples.* or 2 samples, one for each",
        ),
        "fields or samples": (
            [X, X],
            "may be read as a batch of 7 samples, with fields in the list at the top or 2 samp",
        ),
        "columns of equal samples": (([X[0]] * 5, [X[0]] * 5), r"may be read as .*\. Give the number of samples"),
        "different lengths": ({"x": X, "y": Y[:4]}, r"got dict\(x: Tensor \[7, 3\], y: Tensor \[4\]\)"),
        "fields of different lengths": ([X, Y[:4]], r"got list\(Tensor \[7, 3\], Tensor \[4\]\)"),
        "flattened tokens": ({"ids": torch.arange(40), "ends": torch.tensor([0, 9, 40])}, "got dict"),
        "shorter list": ({"x": X, "names": NAMES[:4]}, "got dict"),
        "two numbers": ({"x": X, "size": [224, 224]}, "got dict"),
        "unknown object": ({"x": X, "more": object()}, "more: object"),
        "nothing to divide": ({"rate": 0.5}, "expected a batch with samples, got dict"),
        "number": (torch.tensor(1.0), "expected a batch with samples"),
        "no rows": (torch.zeros(0, 3), "got Tensor"),
        "no entries": ([], "got list"),
    }.values(),
)
def test_what_is_no_batch_or_has_two_readings_is_refused(batch, words):
    with pytest.raises(ValueError, match=f"^ElasticLoader: batch 0 of epoch 0: (?s:.*){words}"):
        ElasticLoader([batch]).batch()


@pytest.mark.parametrize(
    ("size", "shapes"), [(7, [(7, 3), (7, 3)]), (2, [(7, 3)] * 2)], ids=["rows of fields", "entries"]
)
def test_the_size_of_a_batch_chooses_the_reading(size, shapes):
    loader = ElasticLoader([[X, X]], batch_size=size)
    assert loader.settings()["loader_batch_size"] == size
    assert [tuple(part.shape) for part in loader.share(0, 1).samples] == shapes
    loader.advance()
    assert loader.consumed == size


def test_a_batch_that_changes_its_structure_is_named():
    loader = ElasticLoader([[X, X], [X, X[:4]]], batch_size=N)
    loader.batch()
    loader.advance()
    with pytest.raises(
        ValueError, match=r"^ElasticLoader: batch 1 of epoch 0: .*got list.*earlier batches had fields in"
    ):
        loader.batch()


def test_a_share_with_other_samples_than_indices_is_refused():
    with pytest.raises(ValueError, match="Share: expected samples for 9 indices, got 7"):
        list(Share(torch.arange(9), 1.0, X).parts(2))


def test_states_return_from_json_as_they_were():
    state = {
        "random": random.getstate(),
        "numpy": np.random.default_rng(3).bit_generator.state | {"array": np.arange(6.0).reshape(2, 3)},
        "tensors": [torch.get_rng_state(), torch.tensor(2.5, dtype=torch.bfloat16), torch.zeros(0, 2)],
        "by source": {0: 3, (1, "b"): b"\x00\xff", "__tuple__": None},
        "scalar": np.float32(0.1),
    }
    found = from_json(json.loads(json.dumps(to_json(state))))
    assert found["random"] == state["random"]
    assert found["by source"] == state["by source"]
    assert found["numpy"].pop("array").tolist() == state["numpy"].pop("array").tolist()
    assert found["numpy"] == state["numpy"]
    assert all(
        torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found["tensors"], state["tensors"], strict=True)
    )
    assert (found["scalar"], type(found["scalar"])) == (state["scalar"], np.float32)
