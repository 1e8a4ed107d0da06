"""The cost of readers on a training thread, and the bytes that each member reads: `ElasticReaders` and `ElasticLoader`.

    python benches/bench_data.py [--json PATH] [--readers 64] [--members 1 8] [--batches 160] [--batch-size 256]

Each reader packs documents of a file into sequences of 128 tokens, by `evermoe.data.Packed`. One process
plays all members in turns, and the times are those of the first: its own thread, per batch.

"total" is all that its data costs; "states" the part for taking the states of its readers, exchanging and keeping them,
and for the sampler's own. A worker process takes those of the readers itself. `ElasticLoader` reads all sequences on
each member. "bytes" are those that a member reads from the files, relative to those of all batches.
"""

import argparse
import contextlib
import json
import random
import tempfile
import time
import unittest.mock
from pathlib import Path

import evermoe
import evermoe.data
from common import Table, where
from evermoe.data.reader import Reader

LENGTH, DOCUMENTS = 128, 400
"""Tokens of a sequence, and documents of a file."""


class Documents:
    """Token numbers of the documents of some files; counts the bytes that it reads."""

    nbytes = 0

    def __init__(self, files):
        self._files, self._place = files, [0, 0]

    def state_dict(self):
        return {"place": self._place}

    def load_state_dict(self, state):
        self._place = state["place"]

    def __iter__(self):
        while True:
            number, start = self._place
            with self._files[number].open("rb") as file:
                file.seek(start)
                while line := file.readline():
                    Documents.nbytes += len(line)
                    self._place = [number, self._place[1] + len(line)]
                    yield json.loads(line)
            self._place = [(number + 1) % len(self._files), 0]


def write_files(folder, readers):
    """Return a file for each reader."""
    draw, files = random.Random(0), []
    for reader in range(readers):
        files.append(Path(folder) / f"{reader}.jsonl")
        lines = ([draw.randrange(50_000) for _ in range(draw.randrange(20, 600))] for _ in range(DOCUMENTS))
        files[-1].write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return files


class Batches:
    """A loader of global batches, with the state of all files."""

    def __init__(self, files, size):
        self._sequences, self.batch_size = evermoe.data.Packed(Documents(files), LENGTH), size
        self.state_dict, self.load_state_dict = self._sequences.state_dict, self._sequences.load_state_dict

    def __iter__(self):
        sequences = iter(self._sequences)
        while True:
            yield [next(sequences) for _ in range(self.batch_size)]


class Clock:
    """Adds up the seconds of this thread in blocks, and the bytes that they read."""

    def __init__(self):
        self.seconds = self.nbytes = 0

    @contextlib.contextmanager
    def runs(self, is_on=True):
        began, before = time.thread_time(), Documents.nbytes
        yield
        if is_on:
            self.seconds += time.thread_time() - began
            self.nbytes += Documents.nbytes - before


def run(make, members, batches):
    """Return what the first member's thread takes for a batch, of that for states, and the bytes that it has read."""
    samplers, total, states, owner = [make() for _ in range(members)], Clock(), Clock(), [0]

    def timed(function):
        def call(*arguments):
            with states.runs(owner[0] == 0):
                return function(*arguments)

        return call

    with contextlib.ExitStack() as patches:
        for part, name in ((Reader, "_state"), (evermoe.ElasticLoader, "_state_if_due")):
            patches.enter_context(unittest.mock.patch.object(part, name, timed(getattr(part, name))))
        for _ in range(batches):
            shares, exchanged = [], []
            for owner[0], sampler in enumerate(samplers):
                with total.runs(owner[0] == 0):
                    shares.append(sampler.share(owner[0], members))
                    exchanged.append(timed(sampler.states.own)() if sampler.states.is_due else b"")
            sums = sum(share.missing for share in shares), sum(share.remaining for share in shares)
            for owner[0], sampler in enumerate(samplers):
                with total.runs(owner[0] == 0):
                    if sampler.states.is_due:
                        timed(sampler.states.keep)(exchanged)
                    if isinstance(sampler, evermoe.ElasticReaders):
                        sampler.agree(*sums)
                    sampler.advance()
                    state = sampler.state_dict()
                    timed(json.dumps)(state)
    return total.seconds / batches, states.seconds / batches, total.nbytes


def main():
    """Print a table, and write JSON if `--json` is given."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--json", help="file for the results")
    made.add_argument("--readers", type=int, default=64)
    made.add_argument("--members", type=int, nargs="+", default=[1, 8])
    made.add_argument("--batches", type=int, default=160)
    made.add_argument("--batch-size", type=int, default=256)
    chosen = made.parse_args()
    columns = {
        "members": "d",
        "sampler": "<34s",
        "total ms": ".2f",
        "states ms": ".3f",
        "÷ total": ".3f",
        "bytes": ".2f",
    }
    table = Table(f"data: {chosen.readers} readers, batches of {chosen.batch_size}, {where('cpu')}", columns)
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(folder, chosen.readers)

        def readers(workers):
            return evermoe.ElasticReaders(
                lambda reader, _: evermoe.data.Packed(Documents(files[reader : reader + 1]), LENGTH),
                readers=chosen.readers,
                batch_size=chosen.batch_size,
                collate_fn=list,
                num_workers=workers,
            )

        kinds = {
            "ElasticReaders": lambda: readers(0),
            "ElasticReaders, a worker process": lambda: readers(1),
            "ElasticLoader": lambda: evermoe.ElasticLoader(Batches(files, chosen.batch_size)),
        }
        all_bytes = run(kinds["ElasticLoader"], 1, chosen.batches)[2]
        for members in chosen.members:
            for name, make in kinds.items():
                seconds, states, nbytes = run(make, members, chosen.batches)
                figures = {"total ms": seconds * 1e3, "states ms": states * 1e3, "÷ total": states / seconds}
                part = {} if "process" in name else {"bytes": nbytes / all_bytes}
                table.add(members=members, sampler=name, **figures, **part)
    table.write(chosen)


if __name__ == "__main__":
    main()
