"""A session under torchrun: a worker is killed, torchrun restarts both, and they resume from shared memory.

    python examples/11_torchrun.py

The script starts a Lighthouse, then two workers of itself with torchrun. This is equivalent to:

    torchft_lighthouse --bind 127.0.0.1:29510 --min_replicas 1 --heartbeat_timeout_ms 1000 --join_timeout_ms 30000 &
    TORCHFT_LIGHTHOUSE=http://127.0.0.1:29510 torchrun --standalone --nproc-per-node 2 --max-restarts 1 11_torchrun.py

evermoe reads the address from TORCHFT_LIGHTHOUSE, the number of workers to wait for from WORLD_SIZE, and the job's name
from torchrun's run id. It also reads the variables of srun and Kubernetes. Worker 1 kills itself in the middle of step
10. torchrun then stops the other worker and restarts both. Both find the newest step in shared memory.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import evermoe

STEPS, DIES_IN = 30, 10


def train(memory):
    """Train in one worker."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same model and data in all workers
    if torch.cuda.is_available():
        torch.cuda.set_device(evermoe.local_rank() % torch.cuda.device_count())
    worker, start = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    model = nn.Sequential(nn.Linear(8, 16), evermoe.MoE(16, 32, num_experts=4), nn.Linear(16, 1))
    data = torch.randn(4096, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    sampler = evermoe.ElasticSampler(len(data), batch_size=64)
    # snapshot_interval=1 copies each step to shared memory, as torchrun stops all workers of this machine.
    session = evermoe.Session(
        model,
        optimizer,
        sampler,
        preset=evermoe.presets.Auto(snapshot_interval=1),
        membership=evermoe.Membership(memory_dir=memory),
    )
    is_first = True
    for step in session.steps(STEPS):
        if worker == 0 and is_first:
            size = session.group.size
            print(f"start {start} of worker {worker}: a job of {size} that begins at step {step.number}", flush=True)
        is_first = False
        with step as indices:
            x = data[indices]
            loss = nn.functional.mse_loss(model(x), torch.sin(x).sum(1, keepdim=True))
            if worker == 1 and step.number == DIES_IN and start == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(loss)
    if worker == 0:
        lost = sum(report.steps_lost for report in session.reports)
        print(f"{session.step} steps, {lost} lost, loss {session.loss:.3f}")


def main():
    """Start a Lighthouse and torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    limits = ["--min_replicas", "1", "--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "30000"]
    program = Path(sys.executable).with_name("torchft_lighthouse")
    lighthouse = subprocess.Popen([program, "--bind", address, *limits], env=os.environ | {"RUST_LOG": "warn"})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    try:
        with tempfile.TemporaryDirectory() as memory:
            environment = os.environ | {"TORCHFT_LIGHTHOUSE": f"http://{address}", "GLOO_SOCKET_IFNAME": "lo"}
            torchrun += ["--max-restarts", "1", "--log-dir", memory]
            subprocess.run([*torchrun, __file__, memory], env=environment, check=True)
    finally:
        lighthouse.terminate()
        lighthouse.wait()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1])
    else:
        main()
