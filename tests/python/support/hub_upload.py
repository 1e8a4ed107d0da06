"""Trains a model from a folder and uploads it to a Hub between two steps, as `evermoe run` starts it.

    python hub_upload.py FOLDER OUT

`HF_ENDPOINT` names the Hub. OUT gets what was exported.
"""

from __future__ import annotations

import sys

import huggingface_hub
import torch

import evermoe
from evermoe.integrations.transformers import export, from_pretrained
from support.hub import VOCABULARY

STEPS, UPLOADS_AT = 3, 2


def main(folder: str, out: str) -> None:
    torch.set_num_threads(1)
    model, weights = from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    data = torch.randint(3, VOCABULARY, (24, 7), generator=torch.Generator().manual_seed(1))
    session = evermoe.Session(model, optimizer, evermoe.ElasticSampler(len(data), batch_size=6), weights=weights)
    for step in session.steps(STEPS):
        with step as indices:
            tokens = data[indices]
            step.backward(model(input_ids=tokens, labels=tokens).loss)
        if session.step == UPLOADS_AT:
            export(session, model, out)
            with session.alone() as is_mine:
                if is_mine:
                    hub = huggingface_hub.HfApi()
                    hub.create_repo("me/model", exist_ok=True)
                    hub.upload_folder(repo_id="me/model", folder_path=out)
    assert session.group.size == 3 and session.step == STEPS, (session.group.size, session.step)


if __name__ == "__main__":
    main(*sys.argv[1:])
