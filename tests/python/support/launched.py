"""A training script that knows nothing of its launcher; started by torchrun, srun's variables and others in tests.

    python launched.py FOLDER KILLED STEP

Process number KILLED of its launcher kills itself in STEP, once. Each process writes what became of it to FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn

import evermoe
from evermoe._native import digest

STEPS = 10


def main(folder: Path, killed: str, dies_in: int) -> None:
    number = next(os.environ[name] for name in ("RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX") if name in os.environ)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), evermoe.MoE(16, 16, num_experts=6), nn.Linear(16, 1))
    data = torch.randn(120, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    session = evermoe.Session(
        model,
        optimizer,
        evermoe.ElasticSampler(len(data), 12),
        preset=evermoe.presets.Auto(snapshot_interval=1),
        membership=evermoe.Membership(memory_dir=str(folder), join_interval=1, hang_timeout=30, rejoin_timeout=2),
    )
    sizes, losses = [], {}
    for step in session.steps(STEPS):
        with step:
            x = data[step.indices]
            if number == killed and step.number == dies_in:
                mark = folder / "died"
                if not mark.exists():
                    mark.touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            step.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
        if step.committed:
            sizes.append(session.group.size)
            losses[session.step] = session.loss
    dense = torch.cat([each.detach().flatten() for each in (*model[0].parameters(), *model[2].parameters())])
    told = {
        "job": session._config.membership.job,
        "members": session._config.membership.members,
        "local_rank": evermoe.local_rank(),
        "step": session.step,
        "first": min(losses, default=-1),
        "sizes": sizes,
        "losses": losses,
        "lost": [each.steps_lost for each in session.reports],
        "dense": digest(dense.view(torch.uint8).numpy()),
    }
    (folder / f"{number}.json").write_text(json.dumps(told))


def as_task(variables: dict[str, str], folder: Path, killed: str, dies_in: int) -> None:
    """`main` in a process that a launcher gives these variables."""
    os.environ |= variables
    main(folder, killed, dies_in)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
