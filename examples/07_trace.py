"""Profile steps, find the network's idle windows, and write a trace.

    python examples/07_trace.py [trace.json]

Two workers train with a profiler attached. Their clocks are aligned, and the script prints when the network is idle.
The trace opens in https://ui.perfetto.dev. Without an argument it is written to a temporary folder.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import evermoe
from evermoe.profile import Profiler

STEPS = 30


def train():
    """Train in one worker, and write its trace to the folder for shared memory."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), evermoe.MoE(128, 256, num_experts=4), nn.Linear(128, 1))
    data = torch.randn(4096, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    session = evermoe.Session(model, optimizer, evermoe.ElasticSampler(len(data), batch_size=256))
    with Profiler(model, keep=20) as profiler:
        for step in profiler.steps(session.steps(STEPS)):
            with step as indices:
                x = data[indices]
                step.backward(nn.functional.mse_loss(model(x), x[:, :1]))
            if session.step == STEPS - 2:
                report(profiler, profiler.gather_windows(session.group), session.group.rank)
    profiler.write_trace(Path(os.environ["EVERMOE_MEMORY_DIR"]) / f"rank{os.environ['LOCAL_RANK']}.json")


def report(profiler, gathered, rank):
    """Print the idle windows on rank 0."""
    if rank != 0:
        return
    found = gathered.windows[0]
    network = [window for window in found.windows if window.resource == "network"]
    idle = sum(window.seconds for window in network)
    print(f"a step takes {found.step_seconds * 1e3:.1f} ms; {found.evidence}")
    print(f"{len(network)} windows in which the network is idle, {idle * 1e3:.1f} ms together; the longest:")
    for window in sorted(network, key=lambda window: -window.seconds)[:3]:
        print(f"  after {window.after or 'the start of the step'}: {window.seconds * 1e3:.2f} ms")


def main():
    """Run both workers and merge their traces."""
    with tempfile.TemporaryDirectory() as folder:
        evermoe_command = [sys.executable, "-m", "evermoe"]
        subprocess.run([*evermoe_command, "run", "--workers", "2", "--memory-dir", folder, __file__], check=True)
        out = sys.argv[1] if len(sys.argv) > 1 else str(Path(folder) / "trace.json")
        traces = sorted(map(str, Path(folder).glob("rank*.json")))
        subprocess.run([*evermoe_command, "trace", *traces, "--out", out], check=True)
        events = json.loads(Path(out).read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        print(f"the trace of {len({event['pid'] for event in events})} ranks has {len(spans)} spans")


if __name__ == "__main__":
    if "EVERMOE_JOB" in os.environ:
        train()
    else:
        main()
