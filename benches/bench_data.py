"""The cost of readers on a training thread, and the bytes that each member reads: `ElasticReaders` and `ElasticLoader`.

    python benches/bench_data.py [--json PATH] [--readers 64] [--members 1 8] [--batches 160] [--batch-size 256]

Each reader packs documents of a file into sequences of 128 tokens, with the tokens left over in its state. One process
plays all members in turns, and the times are those of the first: its own thread, per batch.

"reading" is the time for its part of a batch from readers without states; "state" is what states add: they are taken,
exchanged and kept. A worker process takes them itself. `ElasticLoader` reads all sequences on each member.
"bytes" are those that a member reads from the files, relative to those of all batches.
"""

import argparse
import contextlib
import functools
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import evermoe
from common import Table, where

LENGTH, DOCUMENTS = 128, 400
"""Tokens of a sequence, and documents of a file."""
ROUNDS = 2


class Packed:
    """Sequences of the documents of some files; counts the bytes that it reads."""

    nbytes = 0

    def __init__(self, files, has_state):
        self._files, self._file, self._place, self._buffer = files, 0, 0, []
        if has_state:
            self.state_dict, self.load_state_dict = self._state, vars(self).update

    def _state(self):
        return {"_file": self._file, "_place": self._place, "_buffer": self._buffer}

    def __iter__(self):
        while True:
            with self._files[self._file].open("rb") as file:
                file.seek(self._place)
                while line := file.readline():
                    Packed.nbytes += len(line)
                    self._place += len(line)
                    self._buffer = self._buffer + json.loads(line)
                    while len(self._buffer) >= LENGTH:
                        found, self._buffer = self._buffer[:LENGTH], self._buffer[LENGTH:]
                        yield found
            self._file, self._place = (self._file + 1) % len(self._files), 0


def write_files(folder, readers):
    """Return a file for each reader."""
    draw, files = random.Random(0), []
    for reader in range(readers):
        files.append(Path(folder) / f"{reader}.jsonl")
        lines = ([draw.randrange(50_000) for _ in range(draw.randrange(20, 600))] for _ in range(DOCUMENTS))
        files[-1].write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return files


def batches_of(files, size, has_state):
    """Return a loader of global batches, with the state of all files."""

    class Loader(Packed):
        batch_size = size

        def __iter__(self):
            sequences = super().__iter__()
            while True:
                yield [next(sequences) for _ in range(size)]

    return Loader(files, has_state)


@contextlib.contextmanager
def counted(totals):
    """Add the seconds of this thread and the bytes read in a block to the totals, if any."""
    began, before = time.thread_time(), Packed.nbytes
    yield
    if totals is not None:
        totals[0] += time.thread_time() - began
        totals[1] += Packed.nbytes - before


def run(make, members, batches):
    """Return the mean seconds of the first member's thread for a batch, and the bytes that it has read."""
    samplers, times, nbytes = [make() for _ in range(members)], [], 0
    states = [sampler.states for sampler in samplers if sampler.states is not None]
    for _ in range(batches):
        shares, exchanged = [], []
        first = [0.0, 0]
        for rank, sampler in enumerate(samplers):
            with counted(first if rank == 0 else None):
                shares.append(sampler.share(rank, members))
                exchanged.append(states[rank].own() if states and states[rank].is_due else b"")
        sums = sum(share.missing for share in shares), sum(share.remaining for share in shares)
        for rank, sampler in enumerate(samplers):
            with counted(first if rank == 0 else None):
                if states and states[rank].is_due:
                    states[rank].keep(exchanged)
                if isinstance(sampler, evermoe.ElasticReaders):
                    sampler.agree(*sums)
                sampler.advance()
                json.dumps(sampler.state_dict())
        times.append(first[0])
        nbytes += first[1]
    return statistics.fmean(times), nbytes


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
        "reading ms": ".2f",
        "state ms": ".3f",
        "÷ reading": ".3f",
        "bytes": ".2f",
    }
    table = Table(f"data: {chosen.readers} readers, batches of {chosen.batch_size}, {where('cpu')}", columns)
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(folder, chosen.readers)

        def readers(has_state, workers):
            return evermoe.ElasticReaders(
                lambda reader, _: Packed(files[reader : reader + 1], has_state),
                readers=chosen.readers,
                batch_size=chosen.batch_size,
                collate_fn=list,
                num_workers=workers,
            )

        def loader(has_state, _):
            return evermoe.ElasticLoader(batches_of(files, chosen.batch_size, has_state))

        kinds = {
            "ElasticReaders": (readers, 0),
            "ElasticReaders, a worker process": (readers, 1),
            "ElasticLoader": (loader, 0),
        }
        all_bytes = run(lambda: loader(False, 0), 1, chosen.batches)[1]
        for members in chosen.members:
            for name, (make, workers) in kinds.items():
                times = {True: [], False: []}
                for has_state in (False, True) * ROUNDS:
                    make_one = functools.partial(make, has_state, workers)
                    seconds, nbytes = run(make_one, members, chosen.batches)
                    times[has_state].append(seconds * 1e3)
                reading, states = min(times[False]), min(times[True]) - min(times[False])
                figures = {"reading ms": reading, "state ms": states, "÷ reading": states / reading}
                part = {} if workers else {"bytes": nbytes / all_bytes}
                table.add(members=members, sampler=name, **figures, **part)
    table.write(chosen)


if __name__ == "__main__":
    main()
