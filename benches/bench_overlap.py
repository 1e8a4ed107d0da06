"""A snapshot of a step's state concurrent with the step's compute, in one run.

    python benches/bench_overlap.py [--device cuda] [--json PATH] [--gib 1 8 32] [--compute-seconds 0.3]

Three candidates run in turns. `compute` is matrix products of about `--compute-seconds`. `capture` copies the state,
which is scattered over tensors of 16 MiB, into an arena. `both` starts the capture on the copying thread, computes, and
ends when both are complete.

`step x` is both ÷ compute: 1 means that the snapshot costs nothing. max(compute, capture) ÷ compute is the best
possible value, unless training waits less for its own update. `waits` is how long the training thread waits for the
capture after its compute. On CUDA the state is on the device, and the thread has streams of its own. The arena is
page-locked, as in a session (`lock` is the time that this took, once), or not, with `--unlocked`. On the CPU, both use
the same cores and the same memory: `--threads 1` leaves one of two cores idle.
"""

import tempfile
import time
from pathlib import Path

import torch

from common import Table, medians, parse, parser, ratio, take_turns, where
from evermoe._native import Arena, CopyEngine
from evermoe.copies.snapshot.chunked_copy import ChunkedCopy

TENSOR_BYTES = 16 << 20


class Candidates:
    """The candidates for one size of the state."""

    def __init__(self, gib, device, seconds, folder, is_locked):
        nbytes = int(gib * 2**30)
        count = max(1, nbytes // TENSOR_BYTES)
        self.device = device
        self.tensors = [torch.randn(nbytes // count // 4, device=device) for _ in range(count)]
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors)
        units = [(f"unit {number}", tensor.nbytes) for number, tensor in enumerate(self.tensors)]
        self.arena = Arena.create(str(folder / f"{gib}.arena"), "{}", units)
        start = time.perf_counter()
        if device == "cuda" and is_locked:
            self.arena.page_lock(0)
        self.lock_seconds = time.perf_counter() - start
        self.engine = CopyEngine()
        self.engine.open()
        self.chunks = ChunkedCopy(self.tensors, for_captures=True) if device == "cuda" else None
        self.version = 0
        self.waits = []
        size = 4096 if device == "cuda" else 512
        self.a, self.b = (torch.randn(size, size, device=device) for _ in range(2))
        self.repeats = 1
        while self._timed(self.compute) < seconds / 2:
            self.repeats *= 2

    def _timed(self, function):
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    def compute(self):
        """Compute matrix products."""
        for _ in range(self.repeats):
            torch.mm(self.a, self.b)
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _capture(self):
        self.version += 1
        if self.chunks is not None:
            return self.chunks.capture(self.engine, self.arena, self.version, [1] * len(self.tensors))
        sources = [[(tensor.data_ptr(), tensor.nbytes)] for tensor in self.tensors]
        return self.engine.capture(self.arena, self.version, sources, self.tensors)

    def both(self):
        """Compute during a capture."""
        capture = self._capture()
        self.compute()
        start = time.perf_counter()
        capture.hurry()
        capture.wait()
        self.waits.append(time.perf_counter() - start)

    def capture(self):
        """Capture without compute."""
        self._capture().wait()

    def close(self):
        """Free all memory."""
        self.engine.shutdown()
        self.arena.unlink()


def main():
    """Print the table."""
    made = parser(__doc__, seconds=6.0, threads=(1,))
    made.add_argument(
        "--gib", type=float, nargs="+", help="sizes of the state (1 8 32 on CUDA, 0.0625 0.25 on the CPU)"
    )
    made.add_argument(
        "--compute-seconds", type=float, default=0.3, help="approximate duration of the compute (%(default)s)"
    )
    made.add_argument(
        "--folder", default="/dev/shm", help="folder for arenas, which take twice the state (%(default)s)"
    )
    made.add_argument(
        "--unlocked", action="store_true", help="CUDA: no page-locked arena; captures go through a small buffer"
    )
    arguments = parse(made)
    sizes = arguments.gib or ([1, 8, 32] if arguments.device == "cuda" else [0.0625, 0.25])
    torch.set_num_threads(arguments.threads[0])
    title = f"snapshots during compute: torch {torch.__version__}, {where(arguments.device)}"
    columns = {"GiB": "7.4f", "compute ms": "9.1f", "capture ms": "9.1f", "GB/s": "7.1f", "step x": "7.3f"}
    table = Table(title, columns | {"best x": "7.3f", "waits ms": "8.1f", "lock s": "7.2f"})
    for gib in sizes:
        with tempfile.TemporaryDirectory(dir=arguments.folder, prefix="evermoe-bench-") as folder:
            try:
                place, is_locked = Path(folder), not arguments.unlocked
                found = Candidates(gib, arguments.device, arguments.compute_seconds, place, is_locked)
            except (OSError, RuntimeError) as error:
                print(f"{gib} GiB: skipped, {str(error).splitlines()[0]}", flush=True)
                continue
            candidates = {"compute": found.compute, "both": found.both, "capture": found.capture}
            times = take_turns(candidates, arguments.seconds)  # by the clock: compute ends with a synchronisation
            micro = medians(times)
            best = max(micro["compute"], micro["capture"]) / micro["compute"]
            waits = sorted(found.waits)[len(found.waits) // 2] * 1e3
            row = {"GiB": gib, "compute ms": micro["compute"] / 1e3, "capture ms": micro["capture"] / 1e3}
            row |= {"GB/s": found.nbytes / micro["capture"] / 1e3, "step x": ratio(times, "both", "compute")}
            table.add(**row, **{"best x": best, "waits ms": waits, "lock s": found.lock_seconds}, microseconds=micro)
            table.write(arguments)  # after each size: the largest may take too long
            found.close()


if __name__ == "__main__":
    main()
