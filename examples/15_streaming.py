"""Train on a stream of Hugging Face datasets, of which each worker reads a part; a worker dies.

    pip install evermoe datasets
    python examples/15_streaming.py

The script writes eight shards of text and starts three workers. Each reads, tokenizes and shuffles the shards of its
own readers. Worker 2 kills itself in step 4, in the middle of an epoch, and the others take over its readers. At the
end the script counts the examples that the workers have used.

Your own data need another `load_dataset` alone, such as `load_dataset("HuggingFaceFW/fineweb", streaming=True)`.
"""

import collections
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import datasets
import torch
from datasets.distributed import split_dataset_by_node
from torch import nn

import evermoe

SHARDS, EXAMPLES, BATCH_SIZE, EPOCHS, DIES_IN, LENGTH = 8, 50, 40, 2, 4, 24
STEPS = EPOCHS * SHARDS * EXAMPLES // BATCH_SIZE


def write_shards(folder):
    """Write files of JSON lines: texts that count in steps of their own."""
    for shard in range(SHARDS):
        numbers = range(shard * EXAMPLES, (shard + 1) * EXAMPLES)
        texts = [" ".join(str(n + step * (n % 5 + 1)) for step in range(9)) for n in numbers]
        lines = [json.dumps({"id": n, "text": text}) + "\n" for n, text in zip(numbers, texts, strict=True)]
        (folder / f"part-{shard}.jsonl").write_text("".join(lines))


def tokenize(example):
    """Return the bytes of a text as tokens, `LENGTH` of them."""
    return {"id": example["id"], "tokens": list(example["text"].encode()[:LENGTH].ljust(LENGTH))}


def read(folder):
    """Return the data of a session: eight readers, each with a shard."""
    files = str(folder / "part-*.jsonl")
    stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True, cache_dir=str(folder))
    stream = stream.shuffle(seed=0, buffer_size=1)  # the shards: each reader gets another one in the next epoch
    stream = stream.map(tokenize, remove_columns=["text"]).with_format("torch")

    def open_reader(reader, readers):
        part = split_dataset_by_node(stream, reader, readers, strategy="shards")
        return evermoe.data.Shuffled(part, buffer_size=16)

    return evermoe.ElasticReaders(open_reader, readers=SHARDS, batch_size=BATCH_SIZE)


class Model(nn.Module):
    """Predicts each byte from the previous one, with a mixture of experts."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(128, 32), nn.Linear(32, 128)
        self.experts = evermoe.MoE(32, 64, num_experts=6)

    def loss(self, tokens):
        """Return the cross entropy."""
        hidden = self.embed(tokens[:, :-1])
        logits = self.head(hidden + self.experts(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(folder):
    """Train in one worker, and write down the examples that it has used."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same model in all workers
    datasets.disable_progress_bars()
    worker, model, used = int(os.environ["LOCAL_RANK"]), Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    session = evermoe.Session(model, optimizer, read(folder), membership=evermoe.Membership(join_interval=1))
    for step in session.steps(STEPS):
        with step as batch:
            if worker == 2 and step.number == DIES_IN:
                (folder / f"used-{worker}.json").write_text(json.dumps(used))
                os.kill(os.getpid(), signal.SIGKILL)
            step.backward(model.loss(batch["tokens"]))
        if step.committed:
            used += batch["id"].tolist()
        if worker == 0 and step.committed and session.step % 5 == 0:
            print(f"step {session.step:2}: loss {session.loss:.3f}, {session.group.size} workers", flush=True)
    (folder / f"used-{worker}.json").write_text(json.dumps(used))


def main():
    """Write the shards, start the workers, and count the examples."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_shards(folder)
        command = [sys.executable, "-m", "evermoe", "run", "--workers", "3", "--memory-dir", temporary]
        subprocess.run([*command, __file__, temporary], check=True)
        used = collections.Counter()
        for path in folder.glob("used-*.json"):
            used.update(json.loads(path.read_text()))
    is_exact = used == dict.fromkeys(range(SHARDS * EXAMPLES), EPOCHS)
    print(f"{len(used)} examples, each used once in each of {EPOCHS} epochs: {is_exact}")


if __name__ == "__main__":
    if "EVERMOE_JOB" in os.environ:
        train(Path(sys.argv[1]))
    else:
        main()
