"""torchtitan's DeepSeek-V3 debug model that survives the death of a worker.

    pip install torchtitan==0.3.0 evermoe
    python examples/torchtitan/train.py

The configuration, model, activation checkpointing, optimizer, learning rates and loss are torchtitan's; the loop and
the experts are evermoe's. Worker 2 of 3 kills itself in step 5, and the others continue. `elastic.py` connects the two.
"""

import os
import signal
import subprocess
import sys
import tempfile

import elastic
import on_cpu  # noqa: F401
import torch
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel

import evermoe

STEPS, DIES_IN, BATCH_SIZE, LENGTH, LAYERS = 10, 5, 12, 16, 3


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


def build(config, processes):
    """Return the model on one of `processes` of a world, with the same weights in all workers."""
    torch.manual_seed(0)
    model = config.model_spec.model.build()
    model.init_weights()
    config.model_spec.parallelize_fn(
        model,
        parallel_dims=ParallelDims.from_config(config.parallelism, processes),
        training=config.training,
        ac_config=config.activation_checkpoint,
        dump_folder=config.dump_folder,
    )
    elastic.balance_load(model)
    return model


def samples():
    """Return sequences of tokens, `[samples, LENGTH + 1]`: torchtitan's data sets are not part of its package."""
    return (torch.arange(4096)[:, None] + torch.arange(LENGTH + 1)) % 61


def train():
    """Train in one worker."""
    torch.set_num_threads(1)
    worker, config = int(os.environ["LOCAL_RANK"]), configure()
    model, loss_function = build(config, processes=1), config.loss.loss_fn.build()
    optimizers = config.optimizer.build(model_parts=[model])
    schedulers = config.lr_scheduler.build(optimizers=optimizers, training_steps=STEPS)
    data = samples()
    session = evermoe.Session(
        model,
        optimizers.optimizers,
        evermoe.ElasticSampler(len(data), batch_size=BATCH_SIZE),
        scheduler=schedulers.schedulers,
        max_grad_norm=config.training.max_norm,
        membership=evermoe.Membership(join_interval=1),
    )
    for step in session.steps(STEPS):
        with step as indices:
            tokens, labels = data[indices, :-1], data[indices, 1:]
            loss, _ = loss_function(model(tokens), labels)
            if worker == 2 and step.number == DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(loss, count=labels.numel())
        if worker == 0 and step.committed:
            print(f"step {session.step:2}: loss {session.loss:.6f}, {session.group.size} workers", flush=True)
    if worker == 0:
        print(f"{session.step} steps committed, {session.reports[-1].steps_lost} lost")


def main():
    """Start the workers."""
    with tempfile.TemporaryDirectory() as memory:
        command = [sys.executable, "-m", "evermoe", "run", "--workers", "3", "--memory-dir", memory]
        subprocess.run([*command, __file__], check=True)


if __name__ == "__main__":
    if "EVERMOE_JOB" in os.environ:
        train()
    else:
        main()
