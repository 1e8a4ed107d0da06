"""Worker of the demo: an ordinary training script. `evermoe run --workers 8 -m evermoe.demo.train` runs it on its own.

`--events FILE` appends every session event to the file as a line of JSON. `--die-at STEP` makes the worker SIGKILL
itself in mid-step, between forward and backward; if the session recovers just before that step, in the middle of the
recovery. `--spare` loads everything and waits for a line on standard input before joining. `--trace` writes a trace
of the last steps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from typing import Any, TextIO

import torch

import evermoe
from evermoe.config.environment import local_rank
from evermoe.demo.corpus import Corpus
from evermoe.demo.model import ByteGPT
from evermoe.demo.worker_flags import add_arguments, session_arguments
from evermoe.events import Event
from evermoe.moe.layer import moe_layers
from evermoe.moe.router import Routes
from evermoe.planning.presets import PRESETS
from evermoe.profile import Profiler


class Reporter:
    """Writes the session's events as JSON lines, and kills this process in the chosen step."""

    def __init__(self, out: TextIO | None, die_at: int | None) -> None:
        self.out, self.die_at = out, die_at
        self.session: evermoe.Session | None = None
        self.recovering = False
        self.routed: dict[str, torch.Tensor] = {}
        """Tokens that this worker's routers gave to each expert in the current step, by MoE layer."""

    def follow(self, model: torch.nn.Module) -> None:
        """Count the routers' choices independently, to check the session's account of lost tokens."""
        for path, layer in moe_layers(model).items():

            def count(_: Any, __: Any, routes: Routes, path: str = path, experts: int = layer.num_experts) -> None:
                if torch.is_grad_enabled():
                    counts = torch.bincount(routes.ids_TK.flatten().cpu(), minlength=experts)
                    self.routed[path] = self.routed.get(path, torch.zeros_like(counts)) + counts

            layer.router.register_forward_hook(count)

    def __call__(self, event: Event) -> None:
        """Handle an event of the session."""
        name, fields = event.name, event.fields()
        if name == "vote" and self.session is not None and self.routed:
            counts = {path: count.tolist() for path, count in self.routed.items()}
            generation = self.session.generation
            self.write("routed", {"step": fields["step"], "generation": generation, "counts": counts})
        if name == "begin":
            self.routed.clear()
        if name == "commit" and self.session is not None:
            fields = fields | {"copied": self.session.copied_step}
        self.write(name, fields)
        if name in ("connection_lost", "recovered"):
            self.recovering = name == "connection_lost"
        if self.recovering and self.session is not None and fields.get("phase") == "fetch":
            self.strike(self.session.step + 1, "recovery")

    def write(self, name: str, fields: dict[str, Any]) -> None:
        """Append one event as one complete line."""
        if self.out is not None:
            self.out.write(json.dumps({"event": name, "time": time.time()} | fields) + "\n")
            self.out.flush()

    def strike(self, step: int, where: str) -> None:
        """SIGKILL this process if this is the chosen step."""
        if self.die_at == step:
            self.write("killed", {"step": step, "where": where})
            os.kill(os.getpid(), signal.SIGKILL)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Parse the worker's flags; None for those of the command line."""
    parser = argparse.ArgumentParser(prog="evermoe.demo.train", description=__doc__.split("\n", 1)[0])
    add_arguments(parser)
    parser.add_argument("--events", metavar="FILE", help="append events as JSON lines")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of this worker's latest steps")
    parser.add_argument("--die-at", type=int, metavar="STEP", help="SIGKILL this process in mid-step")
    parser.add_argument("--spare", action="store_true", help="wait for a line on standard input before joining")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train until `--steps` steps are committed."""
    options = parse(arguments)
    with open(options.events or os.devnull, "a") as out:
        reporter = Reporter(out if options.events else None, options.die_at)
        train(options, reporter)


def build(options: argparse.Namespace, device: torch.device) -> tuple[ByteGPT, torch.optim.Optimizer]:
    """Build the model that the flags describe, with weights of `--seed`, and its optimizer."""
    torch.manual_seed(options.seed)
    names = ("layers", "hidden", "heads", "intermediate", "experts", "top_k", "sequence", "balance")
    model = ByteGPT(**{name: getattr(options, name) for name in names}).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=True)


def train(options: argparse.Namespace, reporter: Reporter) -> None:
    """Run the training loop."""
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank() % torch.cuda.device_count())
        torch.cuda.set_device(device)
    model, optimizer = build(options, device)
    corpus = Corpus(options.data, options.sequence)
    sampler = evermoe.ElasticSampler(len(corpus), options.batch, seed=options.seed)
    session = evermoe.Session(
        model,
        optimizer,
        sampler,
        on_event=reporter,
        max_grad_norm=1.0,
        **session_arguments(options, join_interval=1),
    )
    reporter.session = session
    if PRESETS[options.preset].may_lose_tokens:
        reporter.follow(model)
    profiler = Profiler(model)
    if options.trace:
        profiler.attach()
    reporter.write("ready", {"pid": os.getpid(), "parameters": sum(p.numel() for p in model.parameters())})
    if options.spare and not sys.stdin.readline():
        return
    for step in profiler.steps(session.steps(options.steps)):
        with step as indices:
            loss = model.loss(corpus[indices].to(device))
            reporter.strike(step.number, "step")
            step.backward(loss)
    profiler.detach()
    if options.trace:
        profiler.rank = session.group.rank
        profiler.write_trace(options.trace, windows=session.windows, sent=session.sent())
    if reporter.out is None and session.is_main:
        print(f"{session.step} steps, loss {session.loss:.3f}, {len(session.reports) - 1} changes of membership")


if __name__ == "__main__":
    main()
