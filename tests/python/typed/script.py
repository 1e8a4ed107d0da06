"""A user's training script with types. `make lint` checks it as strictly as mypy can: see pyproject.toml."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import evermoe
from evermoe import events, observe, ops, optim, planning, presets
from evermoe.errors import EvermoeError, LostExperts, NonFiniteLoss
from evermoe.integrations.transformers.trainer import ElasticTrainer, ElasticTrainingArguments


class Model(nn.Module):
    """An embedding, experts and a head."""

    def __init__(self) -> None:
        super().__init__()
        router = evermoe.Router(32, 8, 2, balance_rate=1e-3)
        experts = evermoe.Experts(evermoe.Expert(32, 64, gated=True), 8)
        self.plain = evermoe.MoE(32, 64, num_experts=8, top_k=2)
        self.routed = evermoe.MoE.of(router, experts)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.routed(self.plain(x))
        return y


def report(event: events.Event) -> None:
    """Print the events that an operator acts on."""
    if isinstance(event, events.Commit):
        print(event.step, f"{event.loss:.4f}", event.members)
    elif isinstance(event, events.MemberLost):
        print(event.node, event.kind, event.reason)
    elif isinstance(event, events.Recovered):
        print(sum(event.seconds.values()), event.steps_lost)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer, with an average of the weights."""
    optimizer = optim.AdamW(model.parameters(), lr=3e-4)
    optim.EMA(optimizer, decay=0.999)
    return optimizer


def train(stream: torch.utils.data.IterableDataset[dict[str, Tensor]], path: str) -> float:
    """Train with a loader; returns the last loss."""
    model = Model()
    loader = evermoe.ElasticLoader(torch.utils.data.DataLoader(stream, batch_size=64))
    session = evermoe.Session(
        model, make_optimizer(model), loader, on_event=[report, observe.JsonLines("events.jsonl")]
    )
    try:
        for step in session.steps(1000):
            with step as batch:
                step.backward(model(batch["x"]).square().mean() + evermoe.load_balancing_loss(model))
            if step.committed and session.is_main and session.step % 100 == 0:
                print(session.step, session.loss, session.grad_norm, session.learning_rate)
                saved: str | None = session.save(path)
                print(saved)
    except NonFiniteLoss as error:
        print(error.step, error.rank)
    except LostExperts as error:
        print(error.units)
    except EvermoeError as error:
        print(error)
    return session.loss


def accumulate(data: Tensor) -> dict[str, float]:
    """Train with a sampler, in micro-batches; returns an evaluation."""
    model = Model()

    def sums(batch: Tensor) -> Mapping[str, float | Tensor]:
        return {"loss": model(batch).square().sum(), "count": len(batch)}

    found: dict[str, float] = {}
    membership, placement, checkpoints, preset = groups()
    session = evermoe.Session(
        model,
        make_optimizer(model),
        evermoe.ElasticSampler(len(data), batch_size=64),
        preset=preset,
        membership=membership,
        placement=placement,
        checkpoints=checkpoints,
        shard_optimizer=True,
        max_grad_norm=1.0,
    )
    for step in session.steps(10):
        with step:
            for part in step.micro_batches(4):
                step.backward(model(data[part]).square().sum(), count=len(part))
        found = session.evaluate([data], sums)
    return found


def pipeline(module: nn.Module, x: Tensor, lighthouse: str) -> None:
    """Train a stage of a pipeline."""

    def build(session: evermoe.PipelineSession) -> Schedule1F1B:
        stage = PipelineStage(module, 0, 2, x.device, group=session.pipeline_group)
        return Schedule1F1B(stage, 4, loss_fn=session.loss_function(nn.functional.mse_loss))

    optimizer = optim.SGD(module.parameters(), lr=0.1)
    session = evermoe.PipelineSession(
        module,
        optimizer,
        build,
        stage=0,
        stages=2,
        membership=evermoe.Membership(lighthouse=lighthouse, job="typed"),
        on_event=report,
    )
    for step in session.steps(100):
        with step:
            step.run(x)
        print(session.step, session.loss)


def fine_tune(model: nn.Module, data: torch.utils.data.Dataset[dict[str, Tensor]]) -> None:
    """Train a model of transformers with a `Trainer`."""
    args = ElasticTrainingArguments("out", max_steps=100)
    sampler = evermoe.ElasticSampler(1000, 64)
    trainer = ElasticTrainer(model, args, sampler=sampler, session={"replication": 3}, train_dataset=data)
    trainer.train()
    trainer.end()


def groups() -> tuple[evermoe.Membership, evermoe.Placement, evermoe.Checkpoints, presets.Pec]:
    """Return a group of options of each kind."""
    membership = evermoe.Membership(job="typed", heartbeat_timeout=1.0, on_lost=lambda lost: print(lost.node))
    placement = evermoe.Placement(expert_slots=4, policy="balanced")
    checkpoints = evermoe.Checkpoints("s3://bucket/run", interval=500, keep=2)
    return membership, placement, checkpoints, presets.Pec(experts_per_save=2)


def dispatch(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Send tokens through one expert by the ops alone."""
    row_ids, positions = ops.dispatch_plan(ids, ops.expert_histogram(ids, 1)[:, None])
    return ops.unpermute(ops.permute(x, row_ids, positions), positions, weights)


def plan() -> float:
    """Return the probability that every expert survives the loss of a node."""
    replicas = planning.allocate([4.0, 2.0, 1.0], nodes=3, slots=2)
    placed = planning.place(replicas, nodes=3, slots=2, failures=1)
    return planning.recovery_probability(placed.matrix, failures=1).probability
