"""Memory and step time of `shard_optimizer=True` and `False`, with real workers on this machine.

    python benches/bench_dense.py [--workers 3] [--width 512] [--layers 12] [--rounds 3] [--json PATH]

The model has dense blocks and one small MoE layer. Bytes are those of the optimizer state on each worker, without the
experts. Seconds are those of complete steps. By default there are no copies, so that the times compare the exchanges
alone. Runs of both kinds alternate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import uuid
from pathlib import Path
from typing import Any

import torch
from torch import nn

import evermoe
from common import run_ranks
from evermoe.comm.lighthouse import start_lighthouse

KINDS = ("replicated", "sharded")
SKIPPED = 3
"""Number of steps at the start that are not measured."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12, help="dense blocks of 8 width² parameters")
    parser.add_argument("--steps", type=int, default=15, help="steps of each run (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of runs (%(default)s)")
    parser.add_argument(
        "--replication", type=int, default=0, help="nodes that hold each unit; each worker is a node (%(default)s)"
    )
    parser.add_argument("--json", help="file for the results")
    return parser.parse_args()


def build(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [
        module
        for _ in range(layers)
        for module in (nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
    ]
    return nn.Sequential(*blocks, evermoe.MoE(width, 64, 4), nn.Linear(width, 1))


def work(rank: int, folder: str, options: argparse.Namespace, dense: str, member: dict[str, Any]) -> dict[str, Any]:
    model = build(options.width, options.layers)
    optimizer = evermoe.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(512, options.width, generator=torch.Generator().manual_seed(1))
    trained = evermoe.Session(
        model,
        optimizer,
        evermoe.ElasticSampler(len(data), batch_size=24),
        replication=options.replication,
        membership=evermoe.Membership(node=f"node{rank}", memory_dir=f"{folder}/memory", **member),
        shard_optimizer=dense == "sharded",
    )
    seconds, began = [], 0.0
    for step in trained.steps(options.steps):
        now = time.perf_counter()
        seconds += [now - began] if step.number > SKIPPED else []
        began = now
        with step:
            x = data[step.indices]
            step.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
    kept = sum(t.nbytes for p in trained._state.dense for t in optimizer.state.get(p, {}).values())
    weights = sum(p.nbytes for p in trained._state.dense)
    return {"seconds": seconds, "loss": trained.loss, "optimizer_bytes": kept, "weight_bytes": weights}


def run(options: argparse.Namespace, dense: str, address: str) -> list[dict[str, Any]]:
    """Return the measurements of each worker of one run."""
    member = {"job": f"bench-{uuid.uuid4().hex[:8]}", "lighthouse": address, "members": options.workers}
    return run_ranks(work, options.workers, options, dense, member)


def main() -> None:
    options = parse()
    lighthouse = start_lighthouse(heartbeat_timeout=5, join_timeout=30)
    found: dict[str, list[list[dict[str, Any]]]] = {kind: [] for kind in KINDS}
    try:
        for _ in range(options.rounds):
            for kind in KINDS:
                found[kind].append(run(options, kind, lighthouse.address()))
    finally:
        lighthouse.shutdown()
    result: dict[str, Any] = {"workers": options.workers, "weight_bytes": found["sharded"][0][0]["weight_bytes"]}
    for kind in KINDS:
        result[kind] = {
            "optimizer_bytes": [each["optimizer_bytes"] for each in found[kind][0]],
            "step_seconds": [statistics.median(s for each in once for s in each["seconds"]) for once in found[kind]],
            "loss": found[kind][0][0]["loss"],
        }
    ratios = [b / a for a, b in zip(*(result[kind]["step_seconds"] for kind in KINDS), strict=True)]
    result["step_ratio"] = statistics.median(ratios)
    for kind in KINDS:
        each = result[kind]
        held = ", ".join(f"{nbytes / 1e6:.1f}" for nbytes in each["optimizer_bytes"])
        median = statistics.median(each["step_seconds"])
        print(f"{kind}: MB of optimizer state {held}; step {1e3 * median:.1f} ms; last loss {each['loss']:.7f}")
    print(f"sharded ÷ replicated, step: {result['step_ratio']:.3f} ({min(ratios):.3f} to {max(ratios):.3f})")
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
