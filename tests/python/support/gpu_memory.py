"""Workers that report how much memory of their GPU a step takes, and a recovery: of a model of several equal layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import evermoe
from evermoe.events import Event
from support import worker
from support.harness import Worker
from support.worker import VOCABULARY, WIDTH, Options, Recorder

LAYERS, INNER = 6, 1 << 15
MIN_WORKSPACE = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "128"}
"""Of torch's multiplications, which otherwise take tens of MiB for good."""


class Layers(nn.Module):
    """MoE layers of 50 MB of weights each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(evermoe.MoE(WIDTH, INNER, 6) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


class MeasuredWorker(Worker):
    """Writes an event `peak` as a step begins and when a recovery ends: the most bytes since the previous one."""

    @staticmethod
    def main(options: Options) -> None:
        record = Recorder.__call__

        def record_peak(recorder: Recorder, event: Event) -> None:
            if event.name in ("begin", "recovered") and torch.cuda.is_initialized():
                recorder.write("peak", until=event.name, bytes=torch.cuda.max_memory_allocated())
                torch.cuda.reset_peak_memory_stats()
            record(recorder, event)

        Recorder.__call__ = record_peak  # type: ignore[method-assign]
        worker.make_model = lambda name: Layers()
        worker.main(options)
