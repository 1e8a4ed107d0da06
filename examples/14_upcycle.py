"""Upcycle a dense model into one with experts (Komatsuzaki et al. 2023, arXiv:2212.05055), and train it.

    pip install 'evermoe[transformers]'
    python examples/14_upcycle.py

Each expert begins as a copy of the dense model's feed-forward network. The weights of a token's experts sum to one, so
the new model computes what the dense one did, and its first loss is the same. Equal experts that share tokens would
remain similar, so `drop` draws a part of each expert's inner columns again (Drop-Upcycling, Nakamura et al. 2025,
arXiv:2502.19261): the first loss is higher, and the experts specialise sooner. Worker 1 kills itself in step 8.

The script starts from a tiny Qwen3 with random weights that it trains first, so that nothing is downloaded. With a
folder of yours, only `make_dense` changes.
"""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

import evermoe
from evermoe.integrations.transformers import from_pretrained

EXPERTS, TOP_K, STEPS, DIES_IN = 4, 2, 16, 8


def batches():
    """Return tokens `[240, 12]`: each sequence counts in steps of its own."""
    starts, strides = torch.arange(240).unsqueeze(1), 1 + torch.arange(240).unsqueeze(1) % 5
    return (starts + strides * torch.arange(12)) % 61


def make_dense(folder):
    """Train a dense model for a while, and write its folder."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    model, data = AutoModelForCausalLM.from_config(config), batches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for tokens in data.split(40):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    model.save_pretrained(folder)


def upcycle(dense, experts, top_k, drop=0.0, seed=0):
    """Return a Qwen3-MoE whose experts are copies of the feed-forward networks of a Qwen3.

    Args:
        dense: a Qwen3ForCausalLM.
        experts: number of experts of each layer.
        top_k: number of experts of each token.
        drop: part of the inner columns of each expert that is drawn again, with the mean and the deviation of the dense
            matrix; 0 for exact copies.
        seed: of these columns, and of the routers.
    """
    options = {
        key: value for key, value in dense.config.to_dict().items() if key not in ("model_type", "architectures")
    }
    config = Qwen3MoeConfig(
        **options,
        moe_intermediate_size=dense.config.intermediate_size,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,  # weights sum to one
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dense.dtype)
    state = {name: value for name, value in dense.state_dict().items() if ".mlp." not in name}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(".mlp." in name for name in missing), "the two models differ outside the experts"
    inner = dense.config.intermediate_size
    with torch.no_grad():
        for old, new in zip(dense.model.layers, model.model.layers, strict=True):
            gate, up, down = (getattr(old.mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
            for expert in range(experts):
                columns = torch.randperm(inner)[: round(drop * inner)]
                matrices = [drawn_again(matrix, columns) for matrix in (gate, up, down.T)]
                new.mlp.experts.gate_up_proj[expert] = torch.cat(matrices[:2])
                new.mlp.experts.down_proj[expert] = matrices[2].T
    return model


def drawn_again(matrix, rows):
    """Return a copy with other rows of the same distribution."""
    copy = matrix.detach().clone()
    copy[rows] = torch.randn_like(copy[rows]) * matrix.std() + matrix.mean()
    return copy


def train(folder):
    """Train the upcycled model in one worker."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same data in all workers
    worker, data = int(os.environ["LOCAL_RANK"]), batches()
    model, weights = from_pretrained(folder / "experts")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    session = evermoe.Session(
        model,
        optimizer,
        evermoe.ElasticSampler(len(data), batch_size=40),
        membership=evermoe.Membership(join_interval=1),
        weights=weights,
    )
    for step in session.steps(STEPS):
        with step as indices:
            if worker == 1 and step.number == DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(model(input_ids=data[indices], labels=data[indices]).loss)
        if worker == 0 and step.committed and session.step % 5 == 1:
            print(f"step {session.step:2}: loss {session.loss:.4f}, {session.group.size} workers", flush=True)
    if worker == 0:
        print(f"{session.step} steps committed, {session.reports[-1].steps_lost} lost", flush=True)


def main():
    """Make a dense model, upcycle it, and start the workers."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, tokens = Path(temporary), batches()[:40]
        make_dense(folder / "dense")
        dense = AutoModelForCausalLM.from_pretrained(folder / "dense")
        model, dropped = upcycle(dense, EXPERTS, TOP_K), upcycle(dense, EXPERTS, TOP_K, drop=0.5)
        with torch.no_grad():
            losses = [each(input_ids=tokens, labels=tokens).loss.item() for each in (dense, model, dropped)]
        print(
            "loss of the dense model {:.6f}, upcycled {:.6f}, with half of the columns drawn again {:.6f}".format(
                *losses
            )
        )
        print(f"the first loss is that of the dense model: {abs(losses[0] - losses[1]) < 1e-6 * losses[0]}", flush=True)
        model.save_pretrained(folder / "experts")
        command = [sys.executable, "-m", "evermoe", "run", "--workers", "2", "--memory-dir", temporary]
        subprocess.run([*command, __file__, temporary], check=True)


if __name__ == "__main__":
    if "EVERMOE_JOB" in os.environ:
        train(Path(sys.argv[1]))
    else:
        main()
