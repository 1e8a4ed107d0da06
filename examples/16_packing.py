"""Train on packed sequences from a mixture of two sources; a worker dies.

    python examples/16_packing.py

Documents of two sources, of 5 to 90 tokens, are drawn by weights that change during the run, and packed into sequences
of 64 tokens. Worker 1 kills itself in step 9. The others continue in the middle of the same documents: the script
compares all sequences of the job with those that one process reads alone.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import evermoe

STEPS, DIES_IN, LENGTH, READERS, BATCH_SIZE = 20, 9, 64, 6, 12
LETTERS, DIGITS = range(1, 27), range(27, 37)


def documents(alphabet, seed):
    """Return documents: parts of an alphabet that is repeated without end."""
    draw = random.Random(seed)
    for _ in range(10_000):
        start = draw.randrange(len(alphabet))
        yield [alphabet[(start + n) % len(alphabet)] for n in range(draw.randint(5, 90))]


class Documents:
    """The documents of a reader, with access by index: those read before need not be read again."""

    def __init__(self, alphabet, reader, readers):
        self.found = list(documents(alphabet, seed=0))[reader::readers]

    def __len__(self):
        return len(self.found)

    def __getitem__(self, index):
        return self.found[index]


def weights(number):
    """Return the weights of letters and digits for a document, by its number in the reader."""
    return (0.9, 0.1) if number < 20 else (0.5, 0.5)


def open_reader(reader, readers):
    """Return the sequences of a reader."""
    sources = [Documents(alphabet, reader, readers) for alphabet in (LETTERS, DIGITS)]
    return evermoe.data.Packed(evermoe.data.Mixture(sources, weights=weights), LENGTH)


class Model(nn.Module):
    """Predicts each token from the previous one, with a mixture of experts."""

    def __init__(self):
        super().__init__()
        self.embed, self.places, self.head = nn.Embedding(40, 32), nn.Embedding(LENGTH, 32), nn.Linear(32, 40)
        self.experts = evermoe.MoE(32, 64, num_experts=6)

    def loss(self, batch):
        """Return the sum of the cross entropy, and the number of tokens that it is about."""
        hidden = self.embed(batch["input_ids"]) + self.places(batch["position_ids"])
        logits, labels = self.head(hidden + self.experts(hidden))[:, :-1], batch["labels"][:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return loss, (labels != -100).sum()


def train(folder):
    """Train in one worker, and write down its sequences."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same model in all workers
    worker, model, found = int(os.environ["LOCAL_RANK"]), Model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    data = evermoe.ElasticReaders(open_reader, readers=READERS, batch_size=BATCH_SIZE)
    session = evermoe.Session(model, optimizer, data, membership=evermoe.Membership(join_interval=1))
    for step in session.steps(STEPS):
        with step as batch:
            if worker == 1 and step.number == DIES_IN:
                (folder / f"found-{worker}.json").write_text(json.dumps(found))
                os.kill(os.getpid(), signal.SIGKILL)
            loss, count = model.loss(batch)
            step.backward(loss, count=count)
        if step.committed:
            found += batch["input_ids"].tolist()
        if worker == 0 and step.committed and session.step % 5 == 0:
            print(f"step {session.step:2}: loss {session.loss:.3f}, {session.group.size} workers", flush=True)
    (folder / f"found-{worker}.json").write_text(json.dumps(found))


def read_alone():
    """Return the sequences that one process reads."""
    data, found = evermoe.ElasticReaders(open_reader, readers=READERS, batch_size=BATCH_SIZE), []
    for _ in range(STEPS):
        found += data.share(0, 1).batch["input_ids"].tolist()
        data.advance()
    return found


def main():
    """Start the workers, and compare their sequences."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "evermoe", "run", "--workers", "3", "--memory-dir", folder]
        subprocess.run([*command, __file__, folder], check=True)
        found = [sequence for path in Path(folder).glob("found-*.json") for sequence in json.loads(path.read_text())]
    digits = sum(token in DIGITS for sequence in found for token in sequence) / len(found) / LENGTH
    print(f"{len(found)} sequences, {digits:.0%} of the tokens are digits")
    print(f"the sequences are those that one process reads: {sorted(found) == sorted(read_alone())}")


if __name__ == "__main__":
    if "EVERMOE_JOB" in os.environ:
        train(Path(sys.argv[1]))
    else:
        main()
