"""Training program of all candidates: the demo's model and data, the same batches, the same held-out text.

Candidates differ only in their worker modules, which implement the fault tolerance.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from evermoe.data.sampler import ElasticSampler, Share
from evermoe.demo.corpus import Corpus
from evermoe.demo.train import Reporter, build
from evermoe.demo.worker_flags import add_arguments

MAX_GRAD_NORM = 1.0
"""Norm to which all candidates clip."""


class Program:
    """Model, optimizer, data and sampler of a worker.

    Args:
        options: options of the worker.

    Attributes:
        held_out: bytes `[n, sequence + 1]` that are not used for training.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model, self.optimizer = build(options, torch.device("cpu"))
        self.corpus = Corpus(options.data, options.sequence)
        training = len(self.corpus) - options.held_out
        self.held_out = self.corpus[torch.arange(training, len(self.corpus))]
        self.sampler = ElasticSampler(training, options.batch, seed=options.seed)

    def share(self, step: int, rank: int, size: int) -> Share:
        """Return a rank's part of the batch of a step."""
        self.sampler.consumed = step * self.options.batch
        return self.sampler.share(rank, size)

    def loss(self, share: Share) -> Tensor:
        """Return the mean loss of this part."""
        return self.model.loss(self.corpus[share.indices])

    def held_out_loss(self) -> float:
        """Return the mean loss on the held-out text; collective if experts are on several ranks."""
        self.model.eval()
        with torch.no_grad():
            losses = [float(self.model.loss(part)) * len(part) for part in self.held_out.split(self.options.batch)]
        self.model.train()
        return sum(losses) / len(self.held_out)


def parser(description: str) -> argparse.ArgumentParser:
    """Return the parser of the flags of all workers."""
    parser = argparse.ArgumentParser(description=description)
    add_arguments(parser)
    parser.add_argument("--held-out", type=int, required=True, help="windows of text that are not used for training")
    parser.add_argument("--events", required=True, metavar="FILE", help="append events as JSON lines")
    parser.add_argument("--die-at", type=int, metavar="STEP", help="SIGKILL this process in mid-step")
    parser.add_argument("--worker", type=int, required=True, help="number of this worker")
    parser.add_argument("--expert-parallel", type=int, default=1, help="ranks that hold all experts together")
    parser.add_argument("--store", metavar="HOST:PORT", help="of the run's controller")
    return parser


@contextmanager
def reporting(options: argparse.Namespace) -> Any:
    """Open the file of the worker's events, one line of JSON each."""
    with open(options.events, "a") as out:
        yield Reporter(out, options.die_at)


def main(description: str, work: Callable[[Program, Reporter], None]) -> None:
    """Run a worker with its flags, its program and its events."""
    options = parser(description).parse_args()
    with reporting(options) as reporter:
        work(Program(options), reporter)
    sys.stdout.flush()
