"""Checkpoints: write them while training, resume from one, load the weights into a plain model.

    python examples/09_checkpoint.py

A checkpoint is a folder of safetensors files and a manifest with the digest of every unit. It gets its final name once
all its files are on disk: a checkpoint that exists is complete. It does not depend on the number of workers.
"""

import tempfile
from pathlib import Path

import torch
from torch import nn

import evermoe


def make_model():
    """Return the same model for training and for inference."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), evermoe.MoE(16, 32, num_experts=4), nn.Linear(16, 1))


def train(folder, steps):
    """Train until `steps` steps are committed, from the newest checkpoint in `folder` if there is one."""
    model, data = make_model(), torch.arange(8 * 512.0).view(512, 8).sin()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    sampler = evermoe.ElasticSampler(len(data), batch_size=32)
    session = evermoe.Session(model, optimizer, sampler, checkpoints=evermoe.Checkpoints(folder, interval=10))
    first = None
    for step in session.steps(steps):
        first = step.number if first is None else first
        with step as indices:
            x = data[indices]
            step.backward(nn.functional.mse_loss(model(x), x.mean(1, keepdim=True)))
    print(f"steps {first} to {session.step}, loss {session.loss:.5f}")
    return model


def main():
    """Train 20 steps, then 20 more, and compare with 40 steps in one run."""
    with tempfile.TemporaryDirectory() as folder:
        train(Path(folder) / "parts", 20)
        resumed = train(Path(folder) / "parts", 40)
        print("on disk:", sorted(path.name for path in (Path(folder) / "parts").iterdir()))
        uninterrupted = train(Path(folder) / "uninterrupted", 40)
        same = all(torch.equal(a, b) for a, b in zip(resumed.parameters(), uninterrupted.parameters(), strict=True))
        print("resumed training has the same bits as 40 uninterrupted steps:", same)

        plain = make_model()  # for inference, without a session
        evermoe.load_weights(plain, Path(folder) / "parts" / "step-00000040")
        loaded = all(torch.equal(a, b) for a, b in zip(plain.parameters(), resumed.parameters(), strict=True))
        with torch.no_grad():
            x = torch.arange(8.0).view(1, 8).sin()
            print(f"a plain model has the same weights: {loaded}; it predicts {plain(x).item():.3f} for {x.mean():.3f}")
        assert same and loaded


if __name__ == "__main__":
    main()
