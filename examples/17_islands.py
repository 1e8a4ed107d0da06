"""Two islands of FSDP2, each started by a torchrun of its own; a process dies, and its island comes back.

    python examples/17_islands.py

An island is a group of processes that hold the model together: here FSDP2 divides the dense part over two of them. Its
experts are spread over the processes of both islands. The script starts a Lighthouse, then each island by

    export EVERMOE_JOB=islands EVERMOE_NODE=node-0 EVERMOE_MEMBERS=4 EVERMOE_LIGHTHOUSE=http://127.0.0.1:29510
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 1 17_islands.py

The last variable gives each start of an island a store of its own: that which torchrun shares with its workers keeps
the addresses of processes that have ended, to which gloo would connect.
Process 1 of island 1 kills itself in the middle of step 10. Its island ends, as the other process lacks its shards, and
torchrun starts both again. The processes of island 0 repeat the step and continue, with the same FSDP2 modules and
groups. The new island joins them, and gets its shards from the processes of the same position.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import evermoe

DIES_IN, MOST_STEPS, PROCESSES = 10, 100_000, 2


class Block(nn.Module):
    """A dense layer and a layer of experts."""

    def __init__(self, width, experts):
        super().__init__()
        self.dense, self.moe = nn.Linear(width, width), evermoe.MoE(width, 2 * width, num_experts=experts)

    def forward(self, x):
        """Return `[..., width]`."""
        x = x + torch.relu(self.dense(x))
        return x + self.moe(x)


def train(island, memory):
    """Train in one process of an island."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same model and data in all processes
    has_gpu = torch.cuda.is_available()
    if has_gpu:
        torch.cuda.set_device(evermoe.local_rank() % torch.cuda.device_count())
    device = "cuda" if has_gpu else "cpu"
    mesh = init_device_mesh(device, (PROCESSES,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(8, 16), Block(16, 6), Block(16, 6), nn.Linear(16, 1)).to(device)
    data = torch.randn(4096, 8, device=device)
    # FSDP2 leaves the experts alone: the session spreads them over all islands.
    experts = {parameter for name, parameter in model.named_parameters() if name.endswith("experts.weights")}
    for module in (*model, model):
        fully_shard(module, mesh=mesh, ignored_params=experts)
    session = evermoe.Session(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        evermoe.ElasticSampler(len(data), batch_size=64),
        mesh=mesh,
        max_grad_norm=1.0,
        membership=evermoe.Membership(memory_dir=memory, join_interval=1),
    )
    is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    position, sizes = dist.get_rank(), []
    for step in session.steps(MOST_STEPS):
        with step as indices:
            x = data[indices]
            loss = nn.functional.mse_loss(model(x), torch.sin(x).sum(1, keepdim=True))
            if (island, position, step.number) == (1, 1, DIES_IN) and is_first_start:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(loss)
        sizes.append(session.group.size)
        if (island, position) == (0, 0):
            if sizes[-2:-1] != sizes[-1:]:
                print(f"step {step.number}: {session.group.size} processes train", flush=True)
            if PROCESSES in sizes and sizes[-10:] == [2 * PROCESSES] * 10:
                session.stop()  # all islands: the other one is back, and has trained ten steps
    if (island, position) == (0, 0):
        lost = sum(report.steps_lost for report in session.reports)
        print(f"{lost} steps lost, loss {session.loss:.3f}")
    dist.destroy_process_group()


def main():
    """Start a Lighthouse, and a torchrun for each island."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    limits = ["--min_replicas", "1", "--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "30000"]
    program = Path(sys.executable).with_name("torchft_lighthouse")
    lighthouse = subprocess.Popen([program, "--bind", address, *limits], env=os.environ | {"RUST_LOG": "warn"})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    try:
        with tempfile.TemporaryDirectory() as memory:
            common = {"EVERMOE_LIGHTHOUSE": f"http://{address}", "EVERMOE_JOB": "islands", "EVERMOE_MEMBERS": "4"}
            common |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
            islands = [
                subprocess.Popen(
                    [*torchrun, "--max-restarts", "1", "--log-dir", memory, __file__, str(island), memory],
                    env=os.environ | common | {"EVERMOE_NODE": f"node-{island}"},
                )
                for island in range(2)
            ]
            if any([each.wait() for each in islands]):
                sys.exit("an island has failed")
    finally:
        lighthouse.terminate()
        lighthouse.wait()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(int(sys.argv[1]), sys.argv[2])
    else:
        main()
