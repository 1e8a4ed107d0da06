"""Readers of the loaders that people use: Hugging Face datasets, torchdata, Megatron's samplers."""

from __future__ import annotations

import copy
import functools
import itertools
import json

import datasets
import numpy as np
import pytest
import torch
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

import evermoe
from evermoe.data import Mixture, Packed, Shuffled
from evermoe.errors import UnsupportedState
from support.object_servers import KEY, SECRET
from support.resuming import check_resuming

SHARDS, EXAMPLES = 6, 5


@pytest.fixture(scope="module")
def stream(tmp_path_factory):
    """A stream of shards in JSON lines, which each test copies."""
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(SHARDS):
        lines = [{"text": "ab" * (number % 4 + 1), "id": shard * EXAMPLES + number} for number in range(EXAMPLES)]
        (folder / f"part-{shard}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = [str(folder / f"part-{shard}.jsonl") for shard in range(SHARDS)]
    return datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(folder))


def tokenized(example):
    return {"input_ids": [list(text.encode()) for text in example["text"]]}


PIPELINES = {
    "plain": lambda stream: stream,
    "shards shuffled": lambda stream: stream.shuffle(seed=3, buffer_size=1),
    "map": lambda stream: stream.map(lambda example: {"twice": example["id"] * 2}),
    "batched map, filter": lambda stream: stream.map(tokenized, batched=True, batch_size=3).filter(
        lambda example: example["id"] % 3
    ),
    "skip, take": lambda stream: stream.skip(3).take(9),
    "torch format": lambda stream: stream.select_columns(["id"]).with_format("torch"),
    "interleaved": lambda stream: datasets.interleave_datasets(
        [stream.filter(lambda example: example["id"] % 2), stream], probabilities=[0.7, 0.3], seed=1
    ),
}


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_streams_of_datasets_resume_at_each_example(stream, pipeline):
    def make():
        return split_dataset_by_node(PIPELINES[pipeline](copy.deepcopy(stream)), 1, 2, strategy="shards")

    check_resuming(make, at=range(0, 8, 3))


def test_readers_have_each_example_once(stream):
    shuffled = stream.shuffle(seed=1, buffer_size=1)
    for epoch in range(2):
        found = []
        for reader in range(4):
            part = split_dataset_by_node(shuffled, reader, 4, strategy="shards")
            part.set_epoch(epoch)
            found += [example["id"] for example in part]
        assert sorted(found) == list(range(SHARDS * EXAMPLES))


@pytest.mark.parametrize(
    "around",
    [
        lambda stream: stream,
        lambda stream: stream.map(dict).take(5),
        StatefulDataLoader,
        lambda stream: datasets.interleave_datasets([stream, stream]),
    ],
)
def test_a_shuffle_buffer_that_is_in_no_state_is_refused(stream, around):
    lossy = around(copy.deepcopy(stream).shuffle(buffer_size=10))
    with pytest.raises(UnsupportedState, match=r"omits its shuffle buffer of 10 examples.*evermoe.data.Shuffled"):
        Mixture([[], lossy])


def test_what_is_made_of_streams_resumes(stream):
    def make():
        part = split_dataset_by_node(copy.deepcopy(stream), 0, 2, strategy="shards")
        return Packed(Shuffled(part.map(tokenized, batched=True), 4), 8)

    (first, second) = check_resuming(make, at=range(0, 8, 3))
    assert len(first) >= 8 and first != second


class Numbers(torch.utils.data.IterableDataset):
    """Without a state of its own."""

    def __iter__(self):
        return iter(range(13))


@pytest.mark.parametrize("options", [{}, {"batch_size": None}, {"batch_size": 4}], ids=str)
@pytest.mark.parametrize("kind", ["stream", "map-style"])
def test_torchdatas_loader_resumes_at_each_item(stream, kind, options):
    make_dataset = {"stream": lambda: copy.deepcopy(stream), "map-style": lambda: list(range(13))}
    shuffle = {"shuffle": True} if kind == "map-style" and options.get("batch_size", 1) else {}
    collate = {"collate_fn": lambda items: items}

    def make():
        generator = torch.Generator().manual_seed(0)
        return StatefulDataLoader(make_dataset[kind](), generator=generator, **options, **shuffle, **collate)

    (found,) = check_resuming(make, epochs=1, at=range(0, 4))
    check_resuming(lambda: Shuffled(make(), 3), epochs=1, at=range(0, 4, 2))
    assert found


def test_torchdatas_loader_of_data_without_a_state_is_refused():
    loader = StatefulDataLoader(Numbers(), batch_size=4, collate_fn=list)
    iterator = iter(loader)
    next(iterator)
    resumed = StatefulDataLoader(Numbers(), batch_size=4, collate_fn=list)
    resumed.load_state_dict(loader.state_dict())
    next(iter(resumed))
    assert resumed.state_dict()["_num_yielded"] == 3, "torchdata counts right now: allow such loaders"
    with pytest.raises(UnsupportedState, match="Give Numbers state_dict"):
        Shuffled(loader, 3)


def test_a_stream_of_which_each_reader_reads_all_is_refused(stream):
    for readers, strategy in ((4, "auto"), (3, "examples")):
        with pytest.raises(UnsupportedState, match=rf"each of {readers} readers read all 6 shards.*strategy='shards'"):
            Shuffled(split_dataset_by_node(stream, 0, readers, strategy=strategy), 3)
    Shuffled(split_dataset_by_node(stream, 0, 3), 3)


def open_reader(reader, readers, stream):
    return split_dataset_by_node(stream, reader, readers, strategy="shards").select_columns(["id"])


def all_ids(open_reader, num_workers):
    """Return the ids of an epoch."""
    data = evermoe.ElasticReaders(open_reader, readers=4, batch_size=8, num_workers=num_workers)
    found = []
    while not data.epoch:
        found += data.share(0, 1).batch["id"].tolist()
        data.advance()
    return found


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.full)])
def test_elastic_readers_read_each_example_once(stream, num_workers):
    found = all_ids(functools.partial(open_reader, stream=stream), num_workers)
    assert sorted(found) == list(range(SHARDS * EXAMPLES))


def test_elastic_readers_refuse_what_loses_samples(stream):
    lossy = stream.shuffle(buffer_size=10)
    data = evermoe.ElasticReaders(functools.partial(open_reader, stream=lossy), readers=4, batch_size=8)
    with pytest.raises(UnsupportedState, match="shuffle buffer of 10"):
        data.share(0, 1)


def test_mixtures_are_those_of_datasets_from_the_same_draws(monkeypatch):
    from datasets.iterable_dataset import RandomlyCyclingMultiSourcesExamplesIterable as Theirs

    for strategy, seed in itertools.product(["first_exhausted", "all_exhausted"], range(8)):
        draw = np.random.default_rng(seed)
        sources = [[{"id": f"{name}{number}"} for number in range(draw.integers(1, 7))] for name in "abc"]
        torch.manual_seed(seed)
        ours = [example["id"] for example in Mixture(sources, weights=[5, 3, 2], stopping_strategy=strategy)]
        draws = ["abc".index(each[0]) for each in ours]
        monkeypatch.setattr(Theirs, "_get_indices_iterator", lambda self, draws=draws: iter([*draws, *[0, 1, 2] * 9]))
        streams = [datasets.Dataset.from_list(source).to_iterable_dataset() for source in sources]
        theirs = datasets.interleave_datasets(
            streams, probabilities=[0.5, 0.3, 0.2], seed=0, stopping_strategy=strategy
        )
        expected = [example["id"] for example in theirs]
        assert ours[: len(expected)] == expected, "theirs ends as soon as the last item of a source has been drawn"


def test_a_state_that_needs_arguments_is_refused():
    class StreamingDataset(list):
        """With the interface of mosaicml-streaming's."""

        def state_dict(self, num_samples):
            return {"sample_in_epoch": num_samples}

        def load_state_dict(self, state):
            self.start = state["sample_in_epoch"]

    with pytest.raises(UnsupportedState, match="of StreamingDataset needs arguments"):
        Shuffled(StreamingDataset(), 3)


def test_global_batches_are_those_of_megatrons_samplers():
    """By Megatron's rules: consecutive samples, or torch's permutation with the epoch as its seed."""
    single, cyclic = evermoe.ElasticSampler(96, 16, shuffle=False), evermoe.ElasticSampler(96, 16, seed=0)
    for epoch in range(3):
        order = torch.randperm(96, generator=torch.Generator().manual_seed(epoch))
        for start in range(0, 96, 16):
            assert single.batch().tolist() == list(range(start, start + 16))
            assert cyclic.batch().tolist() == order[start : start + 16].tolist()
            single.advance(), cyclic.advance()


def test_shards_in_s3_are_read_once_by_all_readers(s3, tmp_path):
    for shard in range(4):
        lines = [json.dumps({"id": shard * 5 + number}) + "\n" for number in range(5)]
        (s3.folder / s3.bucket / f"part-{shard}.jsonl").write_text("".join(lines))
    stream = datasets.load_dataset(
        "json",
        data_files=f"{s3.url}/part-*.jsonl",
        split="train",
        streaming=True,
        cache_dir=str(tmp_path / "cache"),
        storage_options={
            "key": KEY,
            "secret": SECRET,
            "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{s3.port}"},
        },
    )
    for num_workers in (0, 2):
        found = all_ids(functools.partial(open_reader, stream=stream), num_workers)
        assert sorted(found) == list(range(20))


@pytest.mark.parametrize("kind", ["shuffle buffer", "no state", "state"])
def test_elastic_loader_skips_no_sample_of_torchdatas_loader(stream, kind, caplog):
    """Resumed again and again; a loader whose state would lose samples reads its epoch again."""

    def make():
        data = Numbers() if kind == "no state" else copy.deepcopy(stream).select_columns(["id"])
        data = data.shuffle(seed=1, buffer_size=7) if kind == "shuffle buffer" else data
        return evermoe.ElasticLoader(StatefulDataLoader(data, batch_size=4))

    def take(loader, count):
        found = []
        for _ in range(count):
            batch = loader.batch()
            found.append((batch if kind == "no state" else batch["id"]).tolist())
            loader.advance()
        return found

    expected, found = take(make(), 20), []
    state, states = None, b""
    while len(found) < 20:
        loader = make()
        if loader.states is not None and states:
            loader.states.keep([states])
        if state is not None:
            loader.load_state_dict(state)
        found += take(loader, 3 + len(found) % 2)
        loader.share(0, 1)
        state = json.loads(json.dumps(loader.state_dict()))
        states = b"" if loader.states is None else loader.states.own()
    assert found[:20] == expected
    assert ("reads the batches of the epoch again" in caplog.text) == (kind != "state")


def test_a_loader_without_a_state_may_have_a_shuffle_buffer(stream):
    loader = torch.utils.data.DataLoader(stream.shuffle(seed=0, buffer_size=10), batch_size=None)
    check_resuming(lambda: Shuffled(loader, 3), at=[0, 5])


@pytest.mark.parametrize(
    "around",
    [
        lambda part: part,
        lambda part: Shuffled(part, 3),
        lambda part: StatefulDataLoader(part, batch_size=None),
        lambda part: iter([part]),
    ],
    ids=["stream", "around a stream", "loader of a stream", "iterator"],
)
def test_readers_that_are_made_before_they_are_opened_are_refused(stream, around):
    """The state of one that had moved would be left in it for the next epoch."""
    before = [split_dataset_by_node(copy.deepcopy(stream), reader, 2, strategy="shards") for reader in range(2)]
    made = [around(part) for part in before]
    for open_reader in (lambda reader, _: made[reader], lambda reader, _: Shuffled(made[reader], 2)):
        data = evermoe.ElasticReaders(open_reader, readers=2, batch_size=8, collate_fn=list)
        with pytest.raises(ValueError, match="open_reader to return a new iterable in each call"):
            data.share(0, 1)
    right = evermoe.ElasticReaders(
        lambda reader, _: around(copy.deepcopy(before[reader])), readers=2, batch_size=2, collate_fn=list
    )
    assert len(right.share(0, 1).batch) == 2


def test_readers_by_index_share_their_data():
    class Indexed(list):
        """Has a state, and is read by indices, as a StreamingDataset."""

        def state_dict(self, number):
            return {"number": number}

        load_state_dict = state_dict

    data, count = Indexed(range(8)), 2
    parts = (torch.utils.data.Subset(data, range(reader, 8, count)) for reader in range(count))
    made = list(parts)
    readers = evermoe.ElasticReaders(lambda reader, _: made[reader], readers=count, batch_size=8)
    assert readers.share(0, 1).batch.tolist() == list(range(8))
