"""The demo's worker: an ordinary training script. `evermoe run --workers 8 -m evermoe.demo.train` runs it for real.

With `--events FILE` every session event is appended there as a line of JSON; `--die-at STEP` makes the worker SIGKILL
itself in mid-step, between forward and backward (or, when the session recovers just before that step, in the middle of
that recovery); `--spare` loads everything and waits for a line on standard input before it joins; `--trace`
writes what its last steps kept busy.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TextIO

import torch

import evermoe
from evermoe.demo.corpus import Corpus
from evermoe.demo.model import ByteGPT
from evermoe.environment import local_rank
from evermoe.events import Event
from evermoe.moe import moe_layers
from evermoe.planning import POLICIES, PRESET_NAMES, PRESETS
from evermoe.profile import Profiler
from evermoe.router import Routes

COPY_FLAGS: Mapping[str, tuple[type, str, str]] = MappingProxyType(
    {
        "experts_per_snapshot": (int, "K", "pec: experts of each layer of a snapshot in their node's memory (half)"),
        "experts_per_save": (int, "K", "pec: experts of each layer that are saved to --checkpoint-dir (a quarter)"),
        "snapshot_every": (int, "STEPS", "pec: steps between snapshots (1); gemini, baft: of a version (as needed)"),
        "save_every": (int, "STEPS", "pec: steps between saves (1)"),
        "expert_selection": (str, "ORDER", "pec: load-aware, or sequential: each in its turn (load-aware)"),
        "plt_limit": (float, "PORTION", "pec: of lost tokens, above which more experts are saved (1.0)"),
        "remote_bytes_per_step": (int, "BYTES", "moetion: to peers, of all workers (bandwidth x time of a step)"),
        "local_bytes_per_step": (int, "BYTES", "moetion: to the experts' own nodes (likewise)"),
        "local_every": (int, "STEPS", "between snapshots in own memory (as few as --copy-budget allows; not pec)"),
        "copy_budget": (float, "SHARE", "of a step that copies may take which do not fit into idle time (0.01)"),
    }
)
"""Options of a session that say what is copied and how often: type, what the value is called, and what it is."""
OPTIONS = (
    "preset",
    "copies",
    "slots",
    "min_replicas",
    "placement",
    "hang_limit",
    "rejoin_limit",
    "checkpoint_every",
    *COPY_FLAGS,
)
"""Flags that are options of the session, under the same names."""


def session_options(options: argparse.Namespace) -> dict[str, Any]:
    """Those that were given, or have a default here."""
    return {name: getattr(options, name) for name in OPTIONS if getattr(options, name) is not None}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this script and `evermoe demo` share."""
    run = add_program_arguments(parser)
    add_session_arguments(parser, run)


def add_program_arguments(parser: argparse.ArgumentParser) -> Any:
    """The sizes of model and run; returns the group of those that are about training."""
    model = parser.add_argument_group("model and data")
    model.add_argument("--data", metavar="PATH", help="a text file or a folder (default: the Python standard library)")
    model.add_argument("--layers", type=int, default=4, help="transformer blocks, each with an MoE layer (%(default)s)")
    model.add_argument("--hidden", type=int, default=128, help="width of a token (%(default)s)")
    model.add_argument("--heads", type=int, default=4, help="attention heads (%(default)s)")
    model.add_argument("--intermediate", type=int, default=256, help="inner width of an expert (%(default)s)")
    model.add_argument("--experts", type=int, default=8, help="experts per MoE layer (%(default)s)")
    model.add_argument("--top-k", type=int, default=2, help="experts per token (%(default)s)")
    model.add_argument("--sequence", type=int, default=128, help="bytes per sample (%(default)s)")
    model.add_argument(
        "--balance", type=float, default=0.01, help="weight of the routers' load-balancing loss (%(default)s)"
    )
    run = parser.add_argument_group("training")
    run.add_argument("--steps", type=int, default=60, help="steps to commit (%(default)s)")
    run.add_argument("--batch", type=int, default=24, help="samples per step over all workers (%(default)s)")
    run.add_argument("--learning-rate", type=float, default=3e-3, help="of AdamW (%(default)s)")
    run.add_argument("--seed", type=int, default=0, help="of weights and sampling (%(default)s)")
    return run


def add_session_arguments(parser: argparse.ArgumentParser, run: Any) -> None:
    """How the state is protected; `run`: the group of flags about training."""
    run.add_argument("--preset", choices=PRESET_NAMES, default="auto", help="how the state is protected (%(default)s)")
    run.add_argument(
        "--slots",
        type=int,
        help="expert replicas per worker and layer (default: the fewest plus one; evermoe demo of moetion and pec: the "
        "fewest)",
    )
    run.add_argument("--placement", choices=POLICIES, help="of experts on workers (default: the preset's)")
    run.add_argument("--min-replicas", type=int, help="of each expert (default: 1; --copies with lazarus)")
    run.add_argument("--copies", type=int, default=2, help="nodes that hold each unit's state; 0: none (%(default)s)")
    run.add_argument("--hang-limit", type=float, default=10.0, help="seconds to wait for a silent peer (%(default)s)")
    run.add_argument("--rejoin-limit", type=float, default=5.0, help="seconds to wait for lost copies (%(default)s)")
    run.add_argument("--checkpoint-dir", metavar="DIR", help="write checkpoints here (default: none)")
    run.add_argument("--checkpoint-every", type=int, default=0, help="steps between checkpoints (%(default)s)")
    copying = parser.add_argument_group("what presets copy, and how often (default: a session's)")
    for name, (kind, metavar, text) in COPY_FLAGS.items():
        copying.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar, help=text)


class Reporter:
    """Writes the session's events as JSON lines and, when its time has come, kills this very process."""

    def __init__(self, out: TextIO | None, die_at: int | None) -> None:
        self.out, self.die_at = out, die_at
        self.session: evermoe.Session | None = None
        self.recovering = False
        self.routed: dict[str, torch.Tensor] = {}
        """Tokens that this worker's router gave to each expert in the current step, by MoE layer."""

    def follow(self, model: torch.nn.Module) -> None:
        """Counts what the routers choose, on its own account: a witness for what the session says was lost."""
        for path, layer in moe_layers(model).items():

            def count(_: Any, __: Any, routes: Routes, path: str = path, experts: int = layer.num_experts) -> None:
                if torch.is_grad_enabled():
                    counts = torch.bincount(routes.ids_TK.flatten().cpu(), minlength=experts)
                    self.routed[path] = self.routed.get(path, torch.zeros_like(counts)) + counts

            layer.router.register_forward_hook(count)

    def __call__(self, event: Event) -> None:
        """The session\'s `on_event`."""
        name, fields = event.name, event.fields()
        if name == "vote" and self.session is not None and self.routed:
            counts = {path: count.tolist() for path, count in self.routed.items()}
            generation = self.session.generation
            self.write("routed", {"step": fields["step"], "generation": generation, "counts": counts})
        if name == "begin":
            self.routed.clear()
        if name == "commit" and self.session is not None:
            layer = next(iter(moe_layers(self.session.model).values()))
            fields = fields | {"load": layer.tokens_E.tolist(), "copied": self.session.copied_step}
        self.write(name, fields)
        if name in ("lost", "recovered"):
            self.recovering = name == "lost"
        if self.recovering and self.session is not None and fields.get("phase") == "fetch":
            self.strike(self.session.step + 1, "recovery")

    def write(self, name: str, fields: dict[str, Any]) -> None:
        """Appends one event; a line is written whole."""
        if self.out is not None:
            self.out.write(json.dumps({"event": name, "time": time.time()} | fields) + "\n")
            self.out.flush()

    def strike(self, step: int, where: str) -> None:
        """SIGKILL if this step is the one to die in."""
        if self.die_at == step:
            self.write("killed", {"step": step, "where": where})
            os.kill(os.getpid(), signal.SIGKILL)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The worker's flags; None: those of the command line."""
    parser = argparse.ArgumentParser(prog="evermoe.demo.train", description=__doc__.split("\n", 1)[0])
    add_arguments(parser)
    parser.add_argument("--events", metavar="FILE", help="append events as JSON lines")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of this worker's latest steps")
    parser.add_argument("--die-at", type=int, metavar="STEP", help="SIGKILL this process in mid-step")
    parser.add_argument("--spare", action="store_true", help="wait for a line on standard input before joining")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Trains until `--steps` steps are committed."""
    options = parse(arguments)
    with open(options.events or os.devnull, "a") as out:
        reporter = Reporter(out if options.events else None, options.die_at)
        train(options, reporter)


def build(options: argparse.Namespace, device: torch.device) -> tuple[ByteGPT, torch.optim.Optimizer]:
    """The model that the flags describe, with weights of `--seed`, and its optimizer."""
    torch.manual_seed(options.seed)
    names = ("layers", "hidden", "heads", "intermediate", "experts", "top_k", "sequence", "balance")
    model = ByteGPT(**{name: getattr(options, name) for name in names}).to(device)
    return model, torch.optim.AdamW(model.parameters(), lr=options.learning_rate, fused=True)


def train(options: argparse.Namespace, reporter: Reporter) -> None:
    """The program itself."""
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
        join_every=1,
        max_grad_norm=1.0,
        checkpoint_dir=options.checkpoint_dir or None,
        **session_options(options),
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
        with step:
            loss = model.loss(corpus[step.indices].to(device))
            reporter.strike(step.number, "step")
            step.backward(loss)
    profiler.detach()
    if options.trace:
        profiler.rank = session.group.rank
        profiler.write_trace(options.trace, windows=session.windows, sent=session.sent())
    if reporter.out is None and session.group.rank == 0 and session.config.role == "train":
        print(f"{session.step} steps, loss {session.loss:.3f}, {len(session.reports) - 1} changes of membership")


if __name__ == "__main__":
    main()
