"""Habits of people who train, each in one plain process and as a worker's script in a session; the two must agree."""

from __future__ import annotations

import itertools
import json
import os
import signal
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import evermoe
from evermoe.moe.layer import update_balance
from support import habit_data
from support.flat_options import grouped
from support.habit_data import DATA, SAMPLES, VOCABULARY, Overflow

WIDTH = 8
STEPS, DIES_IN = 8, 4
lr_scheduler = torch.optim.lr_scheduler


class Model(nn.Module):
    """Two MoE layers between an embedding and a head that may be tied."""

    def __init__(self, tied: bool = False, use_reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use_reentrant = use_reentrant
        """The kind of checkpointing; None for none."""
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = evermoe.MoE(WIDTH, 8, 6, top_k=2)
        self.second = evermoe.MoE(WIDTH, 8, 4, top_k=1, gated=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if tied:
            self.head.weight = self.embedding.weight

    def block(self, x):
        x = x + self.first(x)
        return x + self.second(x)

    def forward(self, tokens):
        x = self.embedding(tokens)
        if self.use_reentrant is None:
            return self.head(self.block(x))
        return self.head(checkpoint(self.block, x, use_reentrant=self.use_reentrant))


def targets_of(tokens):
    """The next tokens; padding (-100) after as many as the first token says."""
    targets = tokens[:, 1:].clone()
    lengths = 1 + tokens[:, :1] % targets.shape[1]
    return targets.masked_fill(torch.arange(targets.shape[1]) >= lengths, -100)


def cross_entropy(model, tokens, targets=None, reduction="mean"):
    targets = tokens[:, 1:] if targets is None else targets
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), targets.flatten(), reduction=reduction)


def mean_loss(model, tokens):
    return cross_entropy(model, tokens) + 0.01 * evermoe.load_balancing_loss(model)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@dataclass
class Habit:
    """One way to train.

    `loss` is that of plain training on a global batch; `step` computes the same in a step of a session.
    """

    loss: Callable[[Any, Any], torch.Tensor] = mean_loss
    step: Callable[[Any, Any], None] = lambda model, step: step.backward(mean_loss(model, DATA[step.indices]))
    model: Callable[[], nn.Module] = Model
    optimizer: Callable[[Any], Any] = adamw
    """One, or a list of several."""
    scheduler: Callable[[Any], Any] = lambda optimizer: None
    """The same, of the optimizers."""
    scaler: Callable[[], Any] = lambda: None
    loader: Callable[[], Any] | None = None
    """Yields global batches, in place of a sampler."""
    readers: Callable[[], Any] | None = None
    """Makes the same batches in a session."""
    sampler: Callable[[], Any] | None = None
    """In place of an `ElasticSampler`."""
    ema: float | None = None
    batch_size: int = 12
    clip: float | None = 0.5
    session: dict[str, Any] = field(default_factory=dict)
    change: Callable[[Any, Any, int], None] = lambda sampler, optimizers, number: None
    """Called before each step with its number."""
    tolerance: float = 2e-6


# ---- how the step's loss is computed


def plain_step(model, step):
    step.backward(cross_entropy(model, DATA[step.indices]))


LENGTHS = (3, 5, 7)
"""Lengths of sequences; each in three steps."""


def grow(sampler, optimizers, number):
    """Another data set, batch size and weight decay from some steps on; said again before each later step."""
    if number >= 2:
        sampler.change(num_samples=40)
    if number >= 4:
        sampler.change(batch_size=15)
    for group in optimizers[0].param_groups if number >= 5 else ():
        group["weight_decay"] = 0.3


def growing_sequences(model, step):
    step.backward(cross_entropy(model, DATA[step.indices][:, : LENGTHS[step.number // 3]]))


def two_losses(model, step):
    tokens = DATA[step.indices]
    step.backward(0.5 * mean_loss(model, tokens))
    step.backward(0.5 * mean_loss(model, tokens))


def micro_batches(model, step):
    for part in step.micro_batches(4):
        step.backward(cross_entropy(model, DATA[part]))


def padded(model, tokens):
    return cross_entropy(model, tokens, targets_of(tokens))


def count_tokens(model, step):
    targets = targets_of(DATA[step.indices])
    step.backward(cross_entropy(model, DATA[step.indices], targets, "sum"), count=(targets >= 0).sum())


def count_tokens_of_parts(model, step):
    for part in step.micro_batches(5):
        targets = targets_of(DATA[part])
        loss = cross_entropy(model, DATA[part], targets, "sum")
        step.backward(loss, count=int((targets >= 0).sum()))


def replayed(model, tokens):
    """Train with other experts than the routers choose: those of a rollout, one further."""
    with torch.no_grad(), evermoe.record_routing(model) as rollout:
        model(tokens[:, :-1])
    with evermoe.replay_routing(model, (rollout.ids + 1) % 4):
        return mean_loss(model, tokens)


def autocast(model, tokens):
    with torch.autocast("cpu", torch.bfloat16):
        return mean_loss(model, tokens)


def large_gradients(model, tokens):
    """A loss that may be scaled by 2**17, and not by 2**21, also for a member that has a third of the batch."""
    return Overflow.apply(mean_loss(model, tokens), 2.0**109.5)


def samples(model, step):
    for batch in step.micro_batches(1):
        step.backward(mean_loss(model, batch))


# ---- models and optimizers


def with_frozen_parts():
    model = Model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("first" in name or "head" in name)
    return model


def thaw_and_freeze(model, number):
    """A layer is trained from step 2 on, the other one before step 3 and after step 5."""
    model.first.requires_grad_(number >= 2)
    model.second.requires_grad_(number < 3 or number > 5)


class Changing(Model):
    """Counts the losses of plain training: one a step."""

    number = -1


def changing_loss(model, tokens):
    model.number += 1
    thaw_and_freeze(model, model.number)
    return cross_entropy(model, tokens)


def changing_step(model, step):
    thaw_and_freeze(model, step.number)
    plain_step(model, step)


def with_balance():
    """The first layer's router chooses by scores and numbers that follow the load (DeepSeek-V3)."""
    model = Model()
    torch.manual_seed(1)
    router = evermoe.Router(WIDTH, 6, 2, scores="sigmoid", groups=3, top_groups=2, scale=2.0, balance_rate=0.05)
    model.first = evermoe.MoE.of(router, evermoe.Experts(evermoe.Expert(WIDTH, 8), 6))
    return model


def balanced(model, tokens):
    """The loss after the balance of the step before; the session does that by itself."""
    update_balance(model)
    model.first.experts.count.reset()
    return cross_entropy(model, tokens)


def with_two_of_four():
    """Both layers use two of four experts for each token."""
    model = Model(use_reentrant=False)
    torch.manual_seed(1)
    model.first, model.second = (evermoe.MoE(WIDTH, 8, 4, top_k=2, gated=gated) for gated in (False, True))
    return model


def groups(model):
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 5e-3}], lr=1e-2
    )


def of(kind, **options):
    return lambda model: kind([p for p in model.parameters() if p.requires_grad], **{"lr": 1e-2, **options})


def muon_and_adamw(muon, with_experts=False, **options):
    """Muon for the head's matrix, or for all but the embedding's, and AdamW for the rest."""

    def make(model):
        matrices = [model.head.weight]
        if with_experts:
            matrices = [p for p in model.parameters() if p.dim() == 2 and p is not model.embedding.weight]
        others = [p for p in model.parameters() if all(p is not each for each in matrices)]
        return [muon(matrices, lr=1e-2), evermoe.optim.AdamW(others, **{"lr": 1e-2, **options})]

    return make


def warmup_and_plateau(optimizers):
    return [
        lr_scheduler.LinearLR(optimizers[0], 0.1, total_iters=5),
        lr_scheduler.ReduceLROnPlateau(optimizers[1], factor=0.5, patience=0, threshold=0.02),
    ]


def listed(given):
    """One or several as a list; None as none."""
    return given if isinstance(given, list) else [] if given is None else [given]


def rates(optimizers):
    """The learning rates of all groups."""
    groups = [group for each in listed(optimizers) for group in each.param_groups]
    return {f"lr {number}": float(group["lr"]) for number, group in enumerate(groups)}


def sequential(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 20)]
    return lr_scheduler.SequentialLR(optimizer, parts, [3])


AdamW, RAdam, Adagrad, RMSprop = (getattr(torch.optim, name) for name in ("AdamW", "RAdam", "Adagrad", "RMSprop"))
SHARDED = {
    "sharded": Habit(optimizer=muon_and_adamw(torch.optim.Muon), session={"shard_optimizer": True}),
    "experts": Habit(optimizer=muon_and_adamw(evermoe.optim.Muon, with_experts=True)),
    "experts, sharded": Habit(
        optimizer=muon_and_adamw(evermoe.optim.Muon, with_experts=True), session={"shard_optimizer": True}
    ),
}
"""Copies of what Muon steps are a step late, so that a step that was taken may be repeated."""
HABITS = {
    "12: readers that end": Habit(loader=habit_data.batches_of_readers, readers=habit_data.readers, step=samples),
    "groups, tied, clipping, several backwards, cosine": Habit(
        model=lambda: Model(tied=True),
        optimizer=groups,
        scheduler=lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
        step=two_losses,
    ),
    "frozen, RAdam, OneCycle": Habit(
        model=with_frozen_parts,
        optimizer=of(RAdam),
        scheduler=lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=100),
    ),
    "AdamW with amsgrad, autocast in bfloat16, Sequential": Habit(
        optimizer=of(AdamW, amsgrad=True),
        scheduler=sequential,
        loss=autocast,
        step=lambda model, step: step.backward(autocast(model, DATA[step.indices])),
        tolerance=2e-3,
    ),
    "thawed and frozen in mid-run": Habit(model=Changing, loss=changing_loss, step=changing_step),
    "balance without a loss": Habit(model=with_balance, loss=balanced, step=plain_step),
    "Adagrad": Habit(optimizer=of(Adagrad)),
    "RMSprop, even accumulation": Habit(
        optimizer=of(RMSprop),
        loss=cross_entropy,
        step=micro_batches,
        tolerance=2e-5,  # it divides by the size of gradients, so that another order of sums shows
    ),
    "AdamW with a tensor as rate": Habit(
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True)
    ),
    "AdamW foreach": Habit(optimizer=of(AdamW, foreach=True)),
    "plain bfloat16": Habit(model=lambda: Model().bfloat16(), tolerance=3e-2),
    "evermoe.optim.AdamW, no clipping": Habit(optimizer=of(evermoe.optim.AdamW), clip=None),
    "6: accumulation with unequal shares": Habit(loss=cross_entropy, step=micro_batches, batch_size=10),
    "9: GradScaler": Habit(
        loss=large_gradients,
        step=lambda model, step: step.backward(large_gradients(model, DATA[step.indices])),
        scaler=lambda: torch.amp.GradScaler(
            "cpu", init_scale=2.0**21, growth_factor=16.0, backoff_factor=1 / 16, growth_interval=2
        ),
    ),
    "10: checkpointing": Habit(model=lambda: Model(use_reentrant=False)),
    "10: reentrant checkpointing": Habit(model=lambda: Model(use_reentrant=True)),
    "routing of a rollout, checkpointing": Habit(
        model=with_two_of_four,
        loss=replayed,
        step=lambda model, step: step.backward(replayed(model, DATA[step.indices])),
    ),
    "11: EMA": Habit(ema=0.8),
    "12: IterableDataset": Habit(
        loader=lambda: torch.utils.data.DataLoader(habit_data.Stream(), batch_size=12), step=samples
    ),
    "12: loader with state": Habit(loader=habit_data.StatefulLoader, step=samples),
    "12: a sampler of one's own": Habit(sampler=habit_data.OwnSampler),
    "14: tokens that are not padding": Habit(loss=padded, step=count_tokens),
    "14: tokens, micro-batches, gemini": Habit(
        loss=padded, step=count_tokens_of_parts, batch_size=10, session={"preset": "gemini"}
    ),
    "two optimizers, two schedules": Habit(optimizer=muon_and_adamw(torch.optim.Muon), scheduler=warmup_and_plateau),
    "18: batches, data and sequences that grow": Habit(loss=cross_entropy, step=growing_sequences, change=grow),
    "evermoe.optim.Muon for experts": Habit(
        optimizer=muon_and_adamw(evermoe.optim.Muon, with_experts=True),
        session={"preset": "lazarus"},
        tolerance=3e-5,  # it multiplies in bfloat16, so that another order of sums shows
    ),
    "15: ReduceLROnPlateau": Habit(
        scheduler=lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.02)
    ),
}


def batches(habit, optimizers):
    if habit.loader is not None:
        loader = habit.loader()
        return itertools.chain.from_iterable(loader for _ in itertools.count())
    sampler = habit.sampler() if habit.sampler else evermoe.ElasticSampler(SAMPLES, habit.batch_size)

    def all_batches():
        for number in itertools.count():
            habit.change(sampler, optimizers, number)
            tokens = DATA[sampler.share(0, 1).indices]
            yield tokens if habit.step is not growing_sequences else tokens[:, : LENGTHS[number // 3]]
            sampler.advance()

    return all_batches()


def plain(name: str) -> list[dict[str, float]]:
    """The report of each step of plain training."""
    habit = (HABITS | SHARDED)[name]
    model = habit.model()
    optimizers = listed(given := habit.optimizer(model))
    schedulers, scaler = listed(habit.scheduler(given)), habit.scaler()
    average = None
    if habit.ema is not None:
        multi = torch.optim.swa_utils.get_ema_multi_avg_fn(habit.ema)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=multi)
    found, samples, counted = [], 0, 0
    for tokens in itertools.islice(batches(habit, optimizers), STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = habit.loss(model, tokens)
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
            scaler.unscale_(*optimizers)
        if habit.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), habit.clip)
        if scaler is None:
            for optimizer in optimizers:
                optimizer.step()
        else:
            scaler.step(*optimizers)
            scaler.update()
        for scheduler in schedulers:
            scheduler.step(*[loss.item()] * isinstance(scheduler, lr_scheduler.ReduceLROnPlateau))
        samples, counted = (
            samples + len(tokens),
            counted + (habit.loss is padded) * (targets_of(tokens) >= 0).sum().item(),
        )
        found.append({"loss": loss.item(), "samples": samples, "tokens": counted, **rates(optimizers)})
        if scaler is not None:
            found[-1]["scale"] = scaler.get_scale()
        if average is not None:
            average.update_parameters(model)
            with torch.no_grad():
                found[-1]["average"] = mean_loss(average.module, DATA[:6]).item()
    return found


# ---- as a worker


def elastic(write: Callable[..., None], name: str, node: str, options: dict[str, Any]) -> None:
    """Trains in a session, and writes what is reported of each committed step."""
    habit = (HABITS | SHARDED)[name]
    model = habit.model()
    optimizer = habit.optimizer(model)
    scheduler, scaler = habit.scheduler(optimizer), habit.scaler()
    sampler: Any = habit.sampler() if habit.sampler else evermoe.ElasticSampler(SAMPLES, habit.batch_size)
    if habit.loader is not None:
        sampler = habit.readers() if habit.readers else evermoe.ElasticLoader(habit.loader())
    ema = None if habit.ema is None else evermoe.optim.EMA(optimizer, habit.ema)

    def on_event(event):
        if event.name in ("recovered", "verified"):
            write(event.name, **{key: value for key, value in event.fields().items() if key != "seconds"})

    options = {"max_grad_norm": habit.clip, **options, **habit.session} | ({"role": "replica"} if node == "r" else {})
    session = evermoe.Session(
        model,
        optimizer,
        sampler,
        scheduler=scheduler,
        scaler=scaler,
        on_event=on_event,
        **grouped(options, node=node),
    )
    for step in session.steps(STEPS):
        habit.change(sampler, listed(optimizer), step.number)
        with step:
            if node == "b" and step.number == DIES_IN:
                os.kill(os.getpid(), signal.SIGKILL)
            habit.step(model, step)
        if step.committed:
            more = rates(optimizer)
            if scaler is not None:
                more["scale"] = scaler.get_scale()
            if ema is not None:
                with ema.applied(), session.evaluation():
                    more["average"] = mean_loss(model, DATA[:6]).item()
            more |= {"loss": session.loss, "samples": session.samples, "tokens": session.tokens}
            write("commit", step=step.number, **more)


def run(script: Callable[..., None], folder: str, name: str, *arguments: Any) -> None:
    """A child of the tests' fork server: `script(*arguments, write)`, with its events in a file of its own."""
    torch.set_num_threads(1)
    log = os.open(Path(folder) / f"{name}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    file = os.open(Path(folder) / f"{name}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(event: str, **fields: Any) -> None:
        os.write(file, json.dumps({"event": event, **fields}).encode() + b"\n")

    warnings.simplefilter("ignore")
    try:
        script(write, *arguments)
    except BaseException as error:
        write("failed", error=type(error).__name__, message=str(error))
        traceback.print_exc()
        raise
