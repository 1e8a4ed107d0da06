"""A model larger than each worker: built without allocation, read from a folder of safetensors files, and trained.

    python examples/12_larger_than_a_device.py

The script writes a folder in the format of Hugging Face, and starts three workers of itself with `evermoe run`. Each
builds the model without allocating it, and reads only its own part: the dense modules and some experts. Worker 2 kills
itself in the middle of step 4. The other two fetch its experts from their copies and continue.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import evermoe

HIDDEN, INTERMEDIATE, EXPERTS, STEPS, DIES_IN = 128, 256, 12, 8, 4


class Model(nn.Module):
    """A model whose experts hold nearly all parameters."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, HIDDEN)
        self.moe = evermoe.MoE(HIDDEN, INTERMEDIATE, EXPERTS, gated=True)
        self.head = nn.Linear(HIDDEN, 64)

    def loss(self, tokens):
        """Return the cross-entropy of predicting each token from the previous ones."""
        x = self.embed(tokens[:, :-1])
        logits = self.head(x + self.moe(x))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def write_folder(folder):
    """Write a folder in place of a download: three tensors per expert, and an index of the file of each tensor."""
    torch.manual_seed(0)
    dense = {key: value for key, value in Model().state_dict().items() if "experts" not in key}
    shapes = {
        "gate_proj": (INTERMEDIATE, HIDDEN),
        "up_proj": (INTERMEDIATE, HIDDEN),
        "down_proj": (HIDDEN, INTERMEDIATE),
    }
    experts = {
        f"moe.experts.{expert}.{name}.weight": 0.02 * torch.randn(shape)
        for expert in range(EXPERTS)
        for name, shape in shapes.items()
    }
    files = {"model-00001-of-00002.safetensors": dense, "model-00002-of-00002.safetensors": experts}
    for name, tensors in files.items():
        save_file(tensors, folder / name)
    index = {key: name for name, tensors in files.items() for key in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def matrices(files, path, expert):
    """Yield an expert's matrices in the order of `evermoe.Experts`."""
    return (files.tensor(f"{path}.{expert}.{name}.weight") for name in ("gate_proj", "up_proj", "down_proj"))


def train(folder):
    """Train in one worker."""
    torch.set_num_threads(1)
    with evermoe.deferred():
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    sampler = evermoe.ElasticSampler(256, batch_size=24)
    weights = evermoe.FolderWeights(folder, matrices)
    session = evermoe.Session(model, optimizer, sampler, placement=evermoe.Placement(expert_slots=6), weights=weights)
    data = torch.randint(64, (256, 9), generator=torch.Generator().manual_seed(1))
    worker, largest = int(os.environ["LOCAL_RANK"]), 0
    for step in session.steps(STEPS):
        with step as indices:
            loss = model.loss(data[indices])
            if worker == 2 and step.number == DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(loss)
        if not largest:
            largest = len(model.moe.experts.ids)
    if worker == 0:
        print(f"worker 0 held {largest} of {EXPERTS} experts, then {len(model.moe.experts.ids)}")
        print(f"{session.step} steps, {session.reports[-1].steps_lost} lost, loss {session.loss:.3f}")


def main():
    """Write the folder and start the workers."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_folder(folder)
        command = [sys.executable, "-m", "evermoe", "run", "--workers", "3", "--memory-dir", temporary, __file__]
        subprocess.run(command, check=True, env=os.environ | {"MODEL_FOLDER": str(folder)})


if __name__ == "__main__":
    if "EVERMOE_JOB" in os.environ:
        train(os.environ["MODEL_FOLDER"])
    else:
        main()
