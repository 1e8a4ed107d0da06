"""A model of transformers that survives the death of a worker, and is exported for transformers to load.

    pip install 'evermoe[transformers]'
    python examples/10_transformers.py

`from_pretrained` creates a model without allocating it. Each of three workers reads only its own experts from the
folder. Worker 2 kills itself in step 10, and the others continue. At the end the checkpoint is exported to a folder.
The script starts from a tiny Qwen3-MoE with random weights, so that nothing is downloaded.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import evermoe
from evermoe.integrations.transformers import export, from_pretrained

STEPS, DIES_IN = 20, 10


def make(folder):
    """Write a folder like those on the hub."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=64,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def train(folder):
    """Train in one worker."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same data in all workers
    worker = int(os.environ["LOCAL_RANK"])
    data = torch.arange(4096).view(256, 16) % 61
    model, weights = from_pretrained(folder / "start")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    session = evermoe.Session(
        model,
        optimizer,
        evermoe.ElasticSampler(len(data), batch_size=24),
        membership=evermoe.Membership(join_interval=1),
        checkpoints=folder / "checkpoints",
        weights=weights,
    )
    for step in session.steps(STEPS):
        with step as indices:
            tokens = data[indices]
            loss = model(input_ids=tokens, labels=tokens).loss
            if worker == 2 and step.number == DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(loss)
        if worker == 0 and step.committed and session.step % 5 == 0:
            print(f"step {session.step:2}: loss {session.loss:.3f}, {session.group.size} workers", flush=True)
    if worker == 0:
        newest = max((folder / "checkpoints").glob("step-*"))
        original, _ = from_pretrained(folder / "start")
        export(evermoe.CheckpointWeights(newest), original, folder / "trained")
        print(f"{session.step} steps committed, {session.reports[-1].steps_lost} lost")


def main():
    """Start the workers, then load the trained model."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make(folder / "start")
        command = [sys.executable, "-m", "evermoe", "run", "--workers", "3", "--memory-dir", temporary]
        subprocess.run([*command, __file__, temporary], check=True)
        model = AutoModelForCausalLM.from_pretrained(folder / "trained")
        tokens = torch.arange(16).view(1, 16)
        print(f"transformers loads it: loss {model(input_ids=tokens, labels=tokens).loss:.3f}")


if __name__ == "__main__":
    if "EVERMOE_JOB" in os.environ:
        train(Path(sys.argv[1]))
    else:
        main()
