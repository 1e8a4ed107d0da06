"""Step time of a session with and without the norm of its gradients, in turns in one process.

    python benches/bench_norm.py [--threads 1] [--seconds 60] [--json PATH]

Steps come in pairs. One step of each pair leaves out the sum of the gradients' squares, from which `session.grad_norm`
follows. Everything else is the same, including the vote. The order within a pair alternates.
"""

import json
import statistics
import time
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

import evermoe
from common import parse, parser, where
from evermoe.demo.model import ByteGPT
from evermoe.session import gradients

SEQUENCE, BATCH = 64, 16
CLOCKS = {"cpu": time.thread_time, "cuda": time.perf_counter}
"""Clocks by device. On the CPU, the time of the training thread alone, which other processes hardly affect."""


class NoSquares:
    """Replaces `gradients.SquareSum`, without the sum."""

    def __init__(self, *_, **__):
        self.norms = torch.zeros(0, dtype=torch.float64)

    def value(self, _):
        return 0.0


def measure(seconds, device):
    """Return the seconds of each step with the norm, and of the paired step without it."""
    torch.manual_seed(0)
    model = ByteGPT(
        layers=4, hidden=256, heads=4, intermediate=512, experts=8, top_k=2, sequence=SEQUENCE, balance=0.01
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    data = torch.randint(256, (1024, SEQUENCE + 1), device=device)
    session = evermoe.Session(model, optimizer, evermoe.ElasticSampler(len(data), BATCH), replication=0)
    squares, times, end = gradients.SquareSum, [], time.perf_counter() + seconds
    began = CLOCKS[device]()
    for step in session.steps(1_000_000):
        kind = (step.number + step.number // 2) % 2  # with, without, without, with
        gradients.SquareSum = (squares, NoSquares)[kind]
        with step as rows:
            tokens = data[rows]
            step.backward(cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()))
        now = CLOCKS[device]()
        times.append((kind, now - began))
        began = now
        if time.perf_counter() > end and len(times) > 40 and len(times) % 2 == 0:
            break
    gradients.SquareSum = squares
    pairs = [dict(times[i : i + 2]) for i in range(10, len(times), 2)]
    return [pair[0] for pair in pairs], [pair[1] for pair in pairs]


def main():
    options = parse(parser(__doc__, seconds=60.0, threads=(1,)))
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        found, without = measure(options.seconds, options.device)
        ratios = sorted(a / b for a, b in zip(found, without, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        row = {
            "threads": threads,
            "pairs": len(ratios),
            "ms": 1e3 * statistics.median(found),
            "ratio": statistics.median(found) / statistics.median(without),
            "quartiles": [low, high],
        }
        rows.append(row)
        print(
            f"{where(options.device)}, {threads} threads: {row['pairs']} pairs, {row['ms']:.1f} ms a step, "
            f"ratio {row['ratio']:.3f}; of single pairs {low:.3f} to {high:.3f} (quartiles)"
        )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
