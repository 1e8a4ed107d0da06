"""torchtitan's DeepSeek-V3 debug model in two islands of FSDP2; one dies.

    pip install torchtitan==0.3.0
    python examples/torchtitan/train.py

The configuration, meshes, model, activation checkpointing, optimizer, learning rates and loss are torchtitan's. The
experts are evermoe's, and so is the loop; `elastic.py` connects the two. Each island is a torchrun of two processes,
over which FSDP2 divides the dense part, while the experts are spread over all four. Process 1 of island 1 kills itself
in step 5, which ends its island. The processes of island 0 repeat the step and continue.

With `--max-restarts`, torchrun starts an island again, and it joins the others: see `examples/17_islands.py`.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import elastic
import on_cpu  # noqa: F401
import torch
import torch.distributed as dist
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

import evermoe

STEPS, DIES_IN, BATCH_SIZE, LENGTH, LAYERS, PROCESSES = 10, 5, 12, 16, 3, 2


def configure():
    """Return torchtitan's configuration, with the experts replaced; it is small enough for two cores."""
    config = deepseek_v3_debugmodel()
    config.training.steps, config.training.seq_len = STEPS, LENGTH
    config.training.mixed_precision_param = "float32"
    config.parallelism.spmd_backend = "partial_dtensor"
    config.model_spec.model.layers = config.model_spec.model.layers[:LAYERS]
    config.model_spec.parallelize_fn = elastic.parallelize
    config.override.imports = ["elastic.elastic_experts", "on_cpu.plain_attention"]
    # As torchtitan's trainer does.
    config.model_spec.model.update_from_config(config=config)
    apply_overrides(config.override, config)
    return config


def build(config, parallel_dims):
    """Return this process's part of the model; all processes start from the same weights."""
    torch.manual_seed(0)
    model = config.model_spec.model.build()
    model.init_weights()
    config.model_spec.parallelize_fn(
        model,
        parallel_dims=parallel_dims,
        training=config.training,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
    )
    return model


def samples():
    """Return sequences of tokens, `[samples, LENGTH + 1]`: torchtitan's data sets are not part of its package."""
    return (torch.arange(4096)[:, None] + torch.arange(LENGTH + 1)) % 61


def train(island, memory):
    """Train in one process of an island."""
    torch.set_num_threads(1)
    dist.init_process_group()
    config = configure()
    parallel_dims = ParallelDims.from_config(config.parallelism, dist.get_world_size())
    model, loss_function = build(config, parallel_dims), config.loss.loss_fn.build()
    elastic.balance_load(model)
    optimizers = config.optimizer.build(model_parts=[model])
    schedulers = config.lr_scheduler.build(optimizers=optimizers, training_steps=STEPS)
    data = samples()
    session = evermoe.Session(
        model,
        optimizers.optimizers,
        evermoe.ElasticSampler(len(data), batch_size=BATCH_SIZE),
        mesh=parallel_dims.get_mesh("fsdp"),
        scheduler=schedulers.schedulers,
        max_grad_norm=config.training.max_norm,
        membership=evermoe.Membership(memory_dir=memory, join_interval=1),
    )
    position = dist.get_rank()
    for step in session.steps(STEPS):
        with step as indices:
            tokens, labels = data[indices, :-1], data[indices, 1:]
            loss, _ = loss_function(model(tokens), labels)
            if (island, position, step.number) == (1, 1, DIES_IN):
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(loss, count=labels.numel())
        if island == 0 and position == 0 and step.committed:
            print(f"step {session.step:2}: loss {session.loss:.6f}, {session.group.size} processes", flush=True)
    if island == 0 and position == 0:
        print(f"{session.step} steps committed, {sum(report.steps_lost for report in session.reports)} lost")
    dist.destroy_process_group()


def main():
    """Start a Lighthouse, and a torchrun for each island."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    limits = ["--min_replicas", "1", "--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "30000"]
    program = Path(sys.executable).with_name("torchft_lighthouse")
    lighthouse = subprocess.Popen([program, "--bind", address, *limits], env=os.environ | {"RUST_LOG": "warn"})
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    common = {"EVERMOE_LIGHTHOUSE": f"http://{address}", "EVERMOE_JOB": "titan", "EVERMOE_MEMBERS": "4"}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    try:
        with tempfile.TemporaryDirectory() as memory:
            survivor, victim = (
                subprocess.Popen(
                    [*torchrun, "--log-dir", memory, __file__, str(island), memory],
                    env=os.environ | common | {"EVERMOE_NODE": f"node-{island}"},
                )
                for island in range(2)
            )
            victim.wait()
            if survivor.wait():
                sys.exit("island 0 has failed")
    finally:
        lighthouse.terminate()
        lighthouse.wait()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(int(sys.argv[1]), sys.argv[2])
    else:
        main()
