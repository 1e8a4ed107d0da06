"""A training loop that survives the death of a worker.

    python examples/03_session.py

The script starts three workers of itself with `evermoe run`. Worker 2 kills itself in the middle of step 10. The other
two agree on the new membership, fetch the experts that only worker 2 trained, repeat step 10 with the same data, and
continue. Nothing is lost.
"""

import os
import signal
import subprocess
import sys
import tempfile

import torch
from torch import nn

import evermoe

STEPS, DIES_IN = 30, 10


class Model(nn.Module):
    """Regression with a mixture of experts."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.experts = evermoe.MoE(16, 32, num_experts=6)
        self.head = nn.Linear(16, 1)

    def loss(self, x):
        """Return the mean squared error of predicting the sum of sines."""
        hidden = self.embed(x)
        predicted = self.head(hidden + self.experts(hidden))
        return nn.functional.mse_loss(predicted, torch.sin(x).sum(1, keepdim=True))


def train():
    """Train in one worker."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same model and data in all workers
    worker = int(os.environ["LOCAL_RANK"])
    model, data = Model(), torch.randn(4096, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    sampler = evermoe.ElasticSampler(len(data), batch_size=96)
    session = evermoe.Session(model, optimizer, sampler, membership=evermoe.Membership(join_interval=1))
    for step in session.steps(STEPS):
        with step as indices:
            loss = model.loss(data[indices])
            if worker == 2 and step.number == DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(loss + 0.01 * evermoe.load_balancing_loss(model))
        if worker == 0 and step.committed and session.step % 5 == 0:
            print(f"step {session.step:2}: loss {session.loss:.3f}, {session.group.size} workers", flush=True)
    if worker == 0:
        report = session.reports[-1]
        took = ", ".join(f"{phase} {seconds:.2f} s" for phase, seconds in report.seconds.items())
        print(f"recovered at step {report.step} with {report.members} workers: {took}")
        print(f"{session.step} steps committed, {report.steps_lost} lost")


def main():
    """Start the workers. Their shared memory is in a temporary folder."""
    with tempfile.TemporaryDirectory() as memory:
        command = [sys.executable, "-m", "evermoe", "run", "--workers", "3", "--memory-dir", memory, __file__]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    if "EVERMOE_JOB" in os.environ:
        train()
    else:
        main()
