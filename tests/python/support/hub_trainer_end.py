"""Trains by `ElasticTrainer`, as `evermoe run` starts it; worker 1 dies in `end`, while worker 0 waits for it.

    python hub_trainer_end.py FOLDER

The worker that is left writes what it has found to FOLDER.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

import evermoe
from evermoe.integrations.transformers import make_elastic
from evermoe.integrations.transformers.trainer import ElasticTrainer, ElasticTrainingArguments
from support.hub import build
from support.hub_trainer import BATCH, SAMPLES, common

STEPS = 2


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    args = ElasticTrainingArguments(
        str(folder / "out"), max_steps=STEPS, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
    )
    trainer = ElasticTrainer(
        make_elastic(build("qwen3")),
        args,
        sampler=evermoe.ElasticSampler(SAMPLES, BATCH),
        session={"checkpoints": str(folder / "checkpoints"), "membership": evermoe.Membership(rejoin_timeout=2.0)},
        **common() | {"callbacks": []},
    )
    trainer.train()
    session = trainer.session
    assert session is not None
    if os.environ["LOCAL_RANK"] == "1":
        alone = session.alone

        @contextmanager
        def dying() -> Iterator[bool]:
            with alone() as is_mine:  # both are in it
                os.kill(os.getpid(), signal.SIGKILL)
                yield is_mine

        session.alone = dying  # type: ignore[method-assign]
    trainer.end()
    members = [report.members for report in session.reports]
    (folder / "ended.json").write_text(json.dumps({"members": members, "step": session.step}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
