"""With `Group.finishes_steps` a block that loses a member runs to its end; its step is repeated to the same bits."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import evermoe
from evermoe._native import digest
from support.beats import BEATS, beat
from support.flat_options import grouped
from support.habits import DATA, VOCABULARY
from support.harness import PATIENCE

WIDTH, STEPS, FAULT = 8, 7, 4
FINISHING, ENDING = "abc", "def"
"""Workers whose blocks run to their ends after a loss, and workers whose blocks end at once."""


class Block(nn.Module):
    """Two MoE layers, around which and between which a second group has collectives."""

    def __init__(self):
        super().__init__()
        self.first = evermoe.MoE(WIDTH, 8, 6, top_k=2)
        self.second = evermoe.MoE(WIDTH, 7, 4, top_k=1, gated=True)

    def forward(self, x):
        x = beat(x + self.first(beat(x)))
        return beat(x + self.second(x))


class Model(nn.Module):
    """Blocks of which the first is repeated in its backward."""

    def __init__(self, use_reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.use_reentrant = use_reentrant
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = checkpoint(self.blocks[0], self.embedding(tokens[:, :-1]), use_reentrant=self.use_reentrant)
        loss = F.cross_entropy(self.head(self.blocks[1](x)).flatten(0, 1), tokens[:, 1:].flatten())
        return loss + 0.01 * evermoe.load_balancing_loss(self)


def train(write, folder, loses, use_reentrant, name, options):
    """A worker that trains; one dies as `loses` says, in or before the step `FAULT`.

    The names of `FINISHING` finish their blocks: the first two of them are the second group. Those of `ENDING` do not.
    """
    finishes = name in FINISHING
    number = (FINISHING if finishes else ENDING).index(name)
    model = Model(use_reentrant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    sampler = evermoe.ElasticSampler(len(DATA), 12)
    session = evermoe.Session(model, optimizer, sampler, seed=0, **grouped(options | {"node": name}))
    session.group.finishes_steps = finishes
    if finishes and number < 2:
        store, limit = dist.FileStore(f"{folder}/second", 2), timedelta(seconds=PATIENCE)
        BEATS.group.rebuild(store, number, 2, torch.device("cpu"), limit)
    place, seen = "", 0

    def die(kind):
        nonlocal seen
        seen += number == 2 and (place, kind) == loses
        if seen == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    BEATS.on_beat = die
    for step in session.steps(STEPS):
        if step.number == FAULT and loses[0] == "evaluation":
            place = "evaluation"
            with session.evaluation():
                model(DATA[:4])
                write("evaluated", broken=session.group.broken is not None)
        if step.number == FAULT and loses[0] == "before" and number == 1 and not seen:
            seen = 1
            session.group.drop("a test")
        place = "step" if step.number == FAULT else ""
        with step as indices:
            step.backward(model(DATA[indices]))
            write("end of block", step=step.number, broken=session.group.broken is not None)
        write("left", step=step.number, is_committed=step.committed)
        if step.committed and session.step == STEPS:
            write("state", digests=digests_of(session))
    write("done", beats=BEATS.count)


def digests_of(session):
    """Return the digest of each unit of this member, with the optimizer's state of it."""
    found, state = {}, session._state
    for unit in state.held():
        data = torch.empty(state.catalog.by_name[unit].nbytes, dtype=torch.uint8)
        state.read(unit, data)
        found[unit] = digest(data.numpy())
    return found


def of(events, name):
    """Return the fields of a worker's events of one name."""
    return [{key: value for key, value in each.items() if key != "event"} for each in events if each["event"] == name]


LOSSES = {
    "in a forward": ("step", "forward"),
    "in a backward": ("step", "backward"),
    "in a repeated forward": ("step", "repeat"),
    "before a block": ("before", ""),
    "in an evaluation": ("evaluation", "forward"),
}


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("loses", LOSSES)
def test_survivors_make_the_same_collectives_and_repeat_the_step(start, tmp_path, loses, use_reentrant):
    states = []
    for names in (ENDING, FINISHING):
        found, logs = start(train, names, str(tmp_path), LOSSES[loses], use_reentrant)
        survivors = names if loses == "before a block" else names[:2]
        for each in survivors:
            assert len(of(found[each], "done")) == 1, logs[each]
            left = [each["step"] for each in of(found[each], "left") if not each["is_committed"]]
            ended = [each["step"] for each in of(found[each], "end of block") if each["broken"]]
            assert left == [FAULT], "one step is repeated"
            assert ended == (left if names == FINISHING else [])
        states.append([of(found[each], "state") for each in survivors])
    assert states[0] == states[1]
    assert all(len(each) == 1 and each[0]["digests"] for each in states[0])
    first, second = (of(found[each], "done")[0]["beats"] for each in FINISHING[:2])
    assert first == second > 0
    if loses == "in an evaluation":
        assert [each["broken"] for each in of(found["a"], "evaluated")] == [True, False]
        assert "its results are wrong" in logs["a"]
