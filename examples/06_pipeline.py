"""A pipeline of `torch.distributed.pipelining` that survives the death of a stage.

    python examples/06_pipeline.py

Two processes run a stage each, with the schedule 1F1B. `PipelineSession` copies each stage to the other process in the
bubbles of the schedule. The second stage kills itself in step 6; `evermoe run` starts it again, both recover, and train
on from step 6 as if nothing had happened.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import evermoe

STEPS, DIES_IN, ROWS, MICROBATCHES, WIDTH = 15, 6, 8, 4, 32


class Stage(nn.Module):
    """One half of the model; the same wherever it is made."""

    def __init__(self, number):
        super().__init__()
        torch.manual_seed(100 + number)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        """`x`: [rows, width]."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def build_schedule(stage, module, session):
    """torch's schedule over this rank's stage; made anew after each failure."""
    example = torch.zeros(ROWS, WIDTH, requires_grad=True)  # by which torch 2.15 knows that gradients are sent
    part = PipelineStage(
        module, stage, 2, torch.device("cpu"), input_args=(example,), output_args=(example,), group=dist.group.WORLD
    )
    return Schedule1F1B(part, MICROBATCHES, loss_fn=session.loss_function(nn.functional.mse_loss))


def run_step(step, schedule, stage):
    """The gradients of one step. The data depend on the step alone."""
    generator = torch.Generator().manual_seed(step.number)
    inputs, target = torch.randn(2, ROWS * MICROBATCHES, WIDTH, generator=generator)
    if stage == 0:
        step.run(schedule, inputs)
    else:
        step.run(schedule, target=target)


def train():
    """What each process runs."""
    torch.set_num_threads(1)
    stage = int(os.environ["LOCAL_RANK"])
    died = Path(os.environ["EVERMOE_MEMORY_DIR"]) / "died"
    module = Stage(stage)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, fused=True)
    session = evermoe.PipelineSession(
        module,
        optimizer,
        stage=stage,
        stages=2,
        data_parallel=0,
        data_parallel_size=1,
        lighthouse=os.environ["EVERMOE_LIGHTHOUSE"],
        job=os.environ["EVERMOE_JOB"],
        node=f"node-{stage}",  # as if each stage had a machine of its own
        memory_dir=os.environ["EVERMOE_MEMORY_DIR"],
    )
    step, schedule = 0, None
    while step < STEPS:
        try:
            if schedule is None:  # at the start, and after a failure
                step = session.recover()
                with session.connecting():
                    schedule = build_schedule(stage, module, session)
                print(f"stage {stage} is ready at step {step}", flush=True)
            with session.begin() as attempt:  # leaving the block votes, then takes optimizer.step()
                run_step(attempt, schedule, stage)
                if stage == 1 and step == DIES_IN and not died.exists():
                    died.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            step = session.step
            if stage == 1 and step % 5 == 0:
                print(f"step {step}: loss {session.loss:.3f}", flush=True)
        except (evermoe.PeerLost, RuntimeError) as error:  # RuntimeError is what gloo raises
            print(f"stage {stage} lost its peer in step {step}: {str(error)[:60]}", flush=True)
            schedule = None
    compared, different = session.verify()
    if stage == 0:
        print(f"{step} steps; {compared} digests of states and copies compared, {len(different)} differ")
    session.close()
    dist.destroy_process_group()


def main():
    """Starts both stages; the one that dies is started again."""
    with tempfile.TemporaryDirectory() as memory:
        command = [sys.executable, "-m", "evermoe", "run", "--workers", "2", "--restarts", "1"]
        subprocess.run([*command, "--memory-dir", memory, __file__], check=True)


if __name__ == "__main__":
    if "EVERMOE_JOB" in os.environ:
        train()
    else:
        main()
