"""A pipeline of `torch.distributed.pipelining` that survives the death of a stage.

    python examples/06_pipeline.py

Two processes run a stage each, with the schedule 1F1B. `PipelineSession` copies each stage to the other process in the
bubbles of the schedule. The second stage kills itself in step 6; `evermoe run` restarts it, and both recover and
continue from step 6 as if nothing had happened.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import evermoe
from evermoe import events

STEPS, DIES_IN, ROWS, MICROBATCHES, WIDTH = 15, 6, 8, 4, 32


class Stage(nn.Module):
    """One half of the model. Every process initializes it with the same values."""

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(100 + number)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        """Map `x` [rows, width] to the same shape."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def build_schedule(session, module, stage):
    """Build torch's schedule for this rank's stage. Called at the start and after each failure."""
    example = torch.zeros(ROWS, WIDTH, requires_grad=True)  # its requires_grad shows torch 2.15 that gradients are sent
    part = PipelineStage(
        module,
        stage,
        2,
        torch.device("cpu"),
        input_args=(example,),
        output_args=(example,),
        group=session.pipeline_group,
    )
    return Schedule1F1B(part, MICROBATCHES, loss_fn=session.loss_function(nn.functional.mse_loss))


def report(event, stage):
    """Print events of the job."""
    if isinstance(event, events.ConnectionLost):
        print(f"stage {stage} lost its peer in step {event.step}: {event.reason[:60]}", flush=True)
    elif isinstance(event, events.Recovered):
        print(f"stage {stage} is ready at step {event.step}", flush=True)
    elif isinstance(event, events.Verified) and stage == 0:
        print(f"{event.digests_checked} digests of states and copies compared, {event.digests_mismatched} differ")


def train():
    """Train one stage."""
    torch.set_num_threads(1)
    stage = int(os.environ["LOCAL_RANK"])
    died = Path(os.environ["EVERMOE_MEMORY_DIR"]) / "died"
    module = Stage(stage)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    session = evermoe.PipelineSession(
        module,
        optimizer,
        lambda session: build_schedule(session, module, stage),
        stage=stage,
        stages=2,
        membership=evermoe.Membership(node=f"node-{stage}"),  # as if each stage had a machine of its own
        on_event=lambda event: report(event, stage),
    )
    for step in session.steps(STEPS):
        generator = torch.Generator().manual_seed(step.number)  # the data depend only on the step
        inputs, target = torch.randn(2, ROWS * MICROBATCHES, WIDTH, generator=generator)
        with step:
            step.run(inputs, target=target)
            if stage == 1 and step.number == DIES_IN and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        if step.committed and session.is_main and session.step % 5 == 0:
            print(f"step {session.step}: loss {session.loss:.3f}", flush=True)


def main():
    """Start both stages. `evermoe run` restarts the one that dies."""
    with tempfile.TemporaryDirectory() as memory:
        command = [sys.executable, "-m", "evermoe", "run", "--workers", "2", "--restarts", "1"]
        subprocess.run([*command, "--memory-dir", memory, __file__], check=True)


if __name__ == "__main__":
    if "EVERMOE_JOB" in os.environ:
        train()
    else:
        main()
