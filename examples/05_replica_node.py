"""A replica node: a process that keeps copies for the workers and does not train itself.

    python examples/05_replica_node.py

Two workers train and one process keeps replicas. All three run the same script; on the replica node `session.steps`
yields nothing. Worker 1 kills itself in step 12. Worker 0 continues alone: it fetches the experts that only worker 1
trained from the replica node, which has repeated their optimizer steps from the gradients.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

import evermoe

STEPS, DIES_IN = 30, 12


def train():
    """Train, or keep replicas, in one of the three processes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    process = int(os.environ["LOCAL_RANK"])  # 0 and 1 train, 2 keeps replicas
    wait_for_replica(process == 2)
    model = nn.Sequential(nn.Linear(8, 16), evermoe.MoE(16, 32, num_experts=4), nn.Linear(16, 1))
    data = torch.randn(4096, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    sampler = evermoe.ElasticSampler(len(data), batch_size=64)
    session = evermoe.Session(
        model,
        optimizer,
        sampler,
        membership=evermoe.Membership(node=f"node-{process}", join_interval=1),
        placement=evermoe.Placement(expert_slots=2),
    )
    for step in session.steps(STEPS):
        with step as indices:
            x = data[indices]
            loss = nn.functional.mse_loss(model(x), torch.sin(x).sum(1, keepdim=True))
            if process == 1 and step.number == DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(loss)
    if process == 0:
        report = session.reports[-1]
        sources = {source: units for source, units in report.sources.items() if units}
        print(f"worker 0 recovered at step {report.step}; it fetched {report.fetched_units} units: {sources}")
        print(f"{session.step} steps, loss {session.loss:.3f}, {report.steps_lost} steps lost")
    if process == 2:
        print(f"the replica node followed {session.step} steps and trained none")


def wait_for_replica(is_replica):
    """Wait until the replica has started. Only this short run needs that: it would otherwise end too soon."""
    started = Path(os.environ["EVERMOE_MEMORY_DIR"]) / "replica-started"
    if is_replica:
        started.touch()
    while not started.exists():
        time.sleep(0.01)


def main():
    """Start two workers and a replica node."""
    with tempfile.TemporaryDirectory() as memory:
        command = [sys.executable, "-m", "evermoe", "run", "--workers", "2", "--replicas", "1"]
        subprocess.run([*command, "--memory-dir", memory, __file__], check=True)


if __name__ == "__main__":
    if "EVERMOE_JOB" in os.environ:
        train()
    else:
        main()
