"""One rank of a small pipeline run as a real process, which kills itself where its options say.

What happens is appended to a file, one JSON object a line, as in `worker.py`.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining

import evermoe
from evermoe._native import digest
from evermoe.comm.torch_groups import WatchedStore
from evermoe.comm.vote import Ballot
from evermoe.pipeline.pipeline_step import PipelineStep
from evermoe.presets import PIPELINE_BY_NAME
from evermoe.state.version import step_of
from support.meeting_files import meet
from support.replay_faults import Killer

ROWS, MICROBATCHES = 16, 4
STAGES, PEERS = 2, 2
V_SCHEDULES = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")


@dataclass
class Options:
    name: str
    folder: str
    lighthouse: str
    rank: int
    stages: int = STAGES
    peers: int = PEERS
    steps: int = 13
    kill_in_step: int | None = None
    """Dies in microbatch `kill_microbatch`, from 0, of this step."""
    kill_microbatch: int = 1
    tells_forwards: bool = False
    """Ranks leave a file after each forward, and one that dies waits until the stage before waits for a backward."""
    kill_in_copy: int | None = None
    """Dies when the first message of this version has been sent."""
    kill_with: int | None = None
    """Rank that dies at the same time."""
    kill_begun: int | None = None
    """Dies when this step begins."""
    kill_reduced: int | None = None
    """Dies in this step when its gradients are summed over the peers."""
    kill_at: str | None = None
    """Dies where `reach` is called with these words."""
    stop_at: str | None = None
    """Stops at these words for the first time, until the test continues it."""
    lingers: str | None = None
    """After a failure it does not recover before this file exists."""
    poison: int | None = None
    """In this step some gradients are infinite."""
    chunks: int = 1
    """Virtual stages of each rank; several for an interleaved schedule."""
    schedule: str = ""
    """Class of `torch.distributed.pipelining`; by default 1F1B, interleaved where ranks have several stages."""
    microbatches: int = MICROBATCHES
    schedules_rate: bool = False
    """Whether the learning rate falls in each step."""
    width: int = 96
    """Of the model."""
    layers: int = 4
    """Of each stage of the model."""
    experts: int = 0
    """Of an MoE layer in each stage; none if 0."""
    shift: float = 0.0
    """Added to the tokens of that layer, so that some experts get more of them."""
    work: int = 0
    """Multiplications of matrices in each forward."""
    tells_experts: bool = False
    """Whether it writes, after each step, the tokens that experts got, and what its node's memory has of experts."""
    trace: bool = False
    verifies: bool = False
    """Whether all copies are compared after each recovery, once they are complete."""
    attempts: str = "means"
    """Kind of the steps: `means` or `counts`, or a mistake."""
    raises: int | None = None
    """Its script raises a RuntimeError of its own in this step, once."""
    stops: int | None = None
    """It calls `session.stop()` in this step."""
    device: str = "cpu"
    """Of the stage."""
    rate: float = 1e-2
    parts: int = 1
    """Runs of the schedule in each step."""
    factor: float = 1.0
    """Of the loss."""
    dropout: float = 0.0
    noise: float = 0.0
    """Added to all inputs: other data than this rank's predecessor had."""
    scaler: dict[str, Any] = field(default_factory=dict)
    """Of the `GradScaler`; none if empty."""
    copies: dict[str, Any] = field(default_factory=dict)
    """Options of `PipelineSession`, of its preset and of `Membership`, by name."""


def grouped(options: dict[str, Any], **membership: Any) -> dict[str, Any]:
    """The arguments of `PipelineSession` from options by name."""
    preset = PIPELINE_BY_NAME[options.get("preset", "baft")]
    of_preset = {each.name for each in fields(preset)}
    of_membership = {each.name for each in fields(evermoe.Membership)}
    left = {name: value for name, value in options.items() if name not in {"preset", *of_preset, *of_membership}}
    membership |= {name: value for name, value in options.items() if name in of_membership}
    chosen = preset(**{name: value for name, value in options.items() if name in of_preset})
    return left | {"preset": chosen, "membership": evermoe.Membership(**membership)}


class Stage(nn.Module):
    """A part of the model: the same on every rank that asks for it."""

    shift = 0.0

    def __init__(
        self, index: int, width: int, work: int, dropout: float = 0.0, layers: int = 4, experts: int = 0
    ) -> None:
        super().__init__()
        torch.manual_seed(100 + index)
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.moe = evermoe.MoE(width, 32, experts) if experts else None
        self.norm = nn.LayerNorm(width)
        self.work, self.dropout = work, dropout
        self.calls = self.forwards = self.backwards = 0

    def note_backward(self, gradient: torch.Tensor) -> None:
        self.backwards += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        matrix = torch.full((256, 256), 1e-3, device=x.device)
        for _ in range(self.work):
            matrix = matrix @ matrix
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        if self.moe is not None:
            x = x + self.moe(x + self.shift)
        x = self.norm(nn.functional.dropout(x, self.dropout))
        x.register_hook(self.note_backward)
        self.forwards += 1  # an exchange of tokens that a loss ended was none
        return x


def write(options: Options, event: str, **fields: Any) -> None:
    path = Path(options.folder) / f"{options.name}.{os.getpid()}.jsonl"
    with path.open("a") as file:
        file.write(json.dumps({"event": event, **fields}) + "\n")


def die_if(options: Options, condition: bool, where: int | str) -> None:
    if condition:
        write(options, "dies", where=where)
        os.kill(os.getpid(), signal.SIGKILL)


def reach(options: Options, point: str) -> None:
    """The worker may die or stop here."""
    die_if(options, point == options.kill_at, point)
    if point == options.stop_at:
        options.stop_at = None
        write(options, "stops", point=point)
        os.kill(os.getpid(), signal.SIGSTOP)


def connected(options: Options, copies: evermoe.PipelineSession) -> None:
    if options.verifies:
        copies._driver.finish_copies(copies.version)
        copies._driver.recovery(copies.version, established=True).verify()
    reach(options, "connected")


def linger(options: Options) -> None:
    """Wait for the file that the options name."""
    while options.lingers and not Path(options.lingers).exists():
        time.sleep(0.01)


def reach_in_store(options: Options) -> None:
    """Points at which this rank has connected to nobody: the others know that it is here; gloo has told them where."""
    original = WatchedStore.set

    def set_and_reach(store: WatchedStore, key: str, value: bytes) -> None:
        original(store, key, value)
        reach(options, "address is known" if key.rpartition("/")[2].isdigit() else "here")

    WatchedStore.set = set_and_reach  # type: ignore[method-assign]


def build_schedule(
    options: Options, chunks: nn.ModuleList, kept: dict[str, Any], copies: evermoe.PipelineSession
) -> Any:
    """The schedule, over groups that the script makes itself."""
    reach(options, "default group")
    size, (_, peer) = options.stages * options.peers, divmod(options.rank, options.peers)
    assert dist.get_process_group_ranks(copies.pipeline_group) == [*range(peer, size, options.peers)]
    chains = [
        dist.new_group([stage * options.peers + peer for stage in range(options.stages)])
        for peer in range(options.peers)
    ]
    reach(options, "peers")
    example = torch.zeros(
        ROWS, options.width, device=options.device, requires_grad=True
    )  # else torch 2.15 would send no gradients
    parts = [
        pipelining.PipelineStage(
            chunk,
            number,
            options.stages * len(chunks),
            torch.device(options.device),
            input_args=(example,),
            output_args=(example,),
            group=chains[peer],
        )
        for number, chunk in zip(stage_numbers(options), chunks, strict=True)
    ]
    kind = options.schedule or ("Schedule1F1B" if len(parts) == 1 else "ScheduleInterleaved1F1B")
    is_single = issubclass(getattr(pipelining.schedules, kind), pipelining.schedules.PipelineScheduleSingle)
    loss = loss_function(options, copies)
    made = getattr(pipelining.schedules, kind)(parts[0] if is_single else parts, options.microbatches, loss_fn=loss)
    reach(options, "all groups")
    kept |= {"schedule": made, "is_connected": True}
    return made


def stage_numbers(options: Options) -> list[int]:
    """Numbers of this rank's virtual stages: in a V, the first rank has the last one, too."""
    stage = options.rank // options.peers
    if options.schedule in V_SCHEDULES:
        return [stage, 2 * options.stages - 1 - stage]
    return [*range(stage, options.stages * options.chunks, options.stages)]


def batch(step: int, peer: int, width: int, parts: int = 1, microbatches: int = MICROBATCHES) -> torch.Tensor:
    """Inputs and targets of all microbatches."""
    generator = torch.Generator().manual_seed(1000 * step + peer)
    return torch.randn(2, parts * ROWS * microbatches, width, generator=generator)


def counted_rows(target: torch.Tensor) -> torch.Tensor:
    """Rows `[n]` that are not padding: other numbers of them on each peer."""
    return target[:, 0] > 0.3


def sum_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Of the rows that are not padding."""
    return (output - target)[counted_rows(target)].square().mean(1).sum()


def run_attempt(options: Options, attempt: PipelineStep, schedule: Any) -> None:
    """All runs of a step."""
    stage, peer = divmod(options.rank, options.peers)
    is_last = options.stages * options.chunks - 1 in stage_numbers(options)
    inputs, target = batch(attempt.number, peer, options.width, options.parts, options.microbatches).to(options.device)
    inputs += options.noise
    reach(options, "step")
    die_if(options, attempt.number == options.kill_begun, attempt.number)
    if attempt.number == options.raises:
        raise RuntimeError("the script itself has failed")
    for part in attempt.micro_batches(options.parts + (options.attempts == "unequal runs" and stage == 0)):
        number = min(part.number, options.parts - 1)
        rows = slice(number * ROWS * options.microbatches, (number + 1) * ROWS * options.microbatches)
        if options.attempts == "no run":
            continue
        if options.attempts == "schedule.step":
            schedule.step(*([inputs[rows]] if stage == 0 else []), **({"target": target[rows]} if is_last else {}))
            continue
        is_counted = options.attempts == "counts" or (options.attempts == "some counts" and peer == 0)
        count = counted_rows(target[rows]).sum() if is_counted and is_last else None
        if options.attempts == "count without loss" and not is_last:
            count = 4
        losses = part.run(inputs[rows], target=target[rows], count=count)
        assert len(losses) == options.microbatches * is_last
        if is_last:
            write(options, "losses", step=attempt.number, losses=[float(each) for each in losses])
    if options.attempts == "optimizer.step":
        options.optimizer.step()  # type: ignore[attr-defined]


def reach_reduction(options: Options, chunks: nn.ModuleList) -> None:
    """Die once gradients are summed over the peers, or makes one of them infinite, if the options say so."""
    end = PipelineStep.end

    def end_and_reach(step: PipelineStep) -> None:
        end(step)
        die_if(options, step.number == options.kill_reduced, step.number)
        if step.number == options.poison:
            next(chunks.parameters()).grad[0] = float("inf")

    PipelineStep.end = end_and_reach  # type: ignore[method-assign]


def digests(copies: evermoe.PipelineSession) -> dict[str, int]:
    found = {}
    for name in copies._state.held():
        data = torch.empty(copies._state.catalog.by_name[name].nbytes, dtype=torch.uint8)
        copies._state.read(name, data)
        found[name] = digest(data.numpy())
    return found


def loss_function(options: Options, copies: evermoe.PipelineSession) -> Any:
    """The loss function of the schedule."""
    if options.attempts == "no loss function":
        return nn.functional.mse_loss
    compute = sum_loss if options.attempts == "counts" else nn.functional.mse_loss
    return copies.loss_function(lambda output, target: compute(output, target) * options.factor)


def watch_copies(options: Options, copies: evermoe.PipelineSession) -> None:
    """Die where a copy of a version is sent, if the options say so."""
    copies._driver.courier.sent = killer = Killer(options.folder, options.rank, options.kill_with)

    def note(*_: Any) -> None:
        killer.marked = options.kill_in_copy is not None and copies.step >= options.kill_in_copy

    note.__module__ = "evermoe"  # a hook of a script's own would be refused where steps are repeated
    copies.optimizer.register_step_post_hook(note)


Tokens = dict[int, dict[tuple[int, int], list[int]]]
"""By step, number of a chunk and digest of a microbatch's choices, what this rank has routed to each expert."""


def count_tokens(chunks: nn.ModuleList, kept: dict[str, Any]) -> Tokens:
    """Counts by itself, once what is computed again: after a failure other microbatches are not."""
    found: Tokens = {}

    def count(number: int, module: nn.Module, inputs: Any) -> None:
        ids = inputs[1].flatten().cpu()
        tokens = torch.bincount(ids, minlength=module.num_experts).tolist()
        found.setdefault(kept["attempt"], {})[number, digest(ids.numpy().view("uint8"))] = tokens

    for number, chunk in enumerate(chunks):
        chunk.moe.experts.register_forward_pre_hook(functools.partial(count, number))
    return found


def about_experts(copies: evermoe.PipelineSession, tokens: Tokens) -> dict[str, Any]:
    """Tokens in the step that is over; steps of the versions of experts in the memory of this node; digests."""
    stored: dict[str, list[int]] = {}
    for each in copies._driver.copies.store.stored():
        if "experts" in each.unit:
            stored.setdefault(each.unit, []).append(step_of(each.version))
    counted = tokens[copies.step - 1]
    by_chunk = [
        [sum(column) for column in zip(*(each for (at, _), each in counted.items() if at == number), strict=True)]
        for number in sorted({number for number, _ in counted})
    ]
    return {"tokens": by_chunk, "stored": stored, "digests": digests(copies)}


def note(options: Options, kept: dict[str, Any], event: evermoe.events.Event) -> None:
    """Write an event. Keep the bytes that were sent of each version, and the gradient's squares of the step.

    Of the parts of a version, or of a slice of one, only the last is written. Before it votes on a version, or copies
    one after a recovery, the worker may die or stop.
    """
    if isinstance(event, evermoe.events.ChunkSent):
        kept.setdefault("sent", {})[event.step] = event.sent
        if event.sent < event.total:
            return
    if isinstance(event, evermoe.events.Recovered):
        tell_recovery(options, kept, event)
    elif not isinstance(event, evermoe.events.SnapshotReceived):
        write(options, event.name, **event.fields())
    if isinstance(event, evermoe.events.ConnectionLost):
        linger(options)
    if isinstance(event, evermoe.events.Verified):
        kept |= {"compared": event.digests_checked, "different": event.units}
    if event.name == "protocol":
        if "sums" in event.said:
            kept["squares"] = Ballot.from_bits(event.said["sums"]).squares
        for command in event.commands:
            if command["command"] in ("vote", "protect"):
                reach(options, f"{command['command']} {step_of(command['version'])}")


def tell_recovery(options: Options, kept: dict[str, Any], event: evermoe.events.Recovered) -> None:
    """Write what the latest recovery did. The worker may die then, before torch connects."""
    copies, kept["first chunk"].calls = kept["session"], 0
    if event.stale and options.tells_experts:  # all that follows is computed again, and is other
        kept["tokens"].clear()
    more = {"digests": digests(copies)} if options.tells_experts else {}
    write(options, event.name, **event.fields(), far_bytes=copies._driver.history.outcome.far_bytes, **more)
    reach(options, "recovered")


def train(options: Options) -> None:
    stage, peer = divmod(options.rank, options.peers)
    numbers = stage_numbers(options)
    sizes = options.width, options.work, options.dropout, options.layers, options.experts
    chunks = nn.ModuleList([Stage(number, *sizes) for number in numbers]).to(options.device)
    Stage.shift = options.shift
    optimizer = torch.optim.AdamW(chunks.parameters(), lr=options.rate, fused=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) if options.schedules_rate else None
    options.optimizer = optimizer  # type: ignore[attr-defined]
    kept: dict[str, Any] = {"first chunk": chunks[0]}
    kept["session"] = copies = evermoe.PipelineSession(
        chunks,
        optimizer,
        functools.partial(build_schedule, options, chunks, kept),
        stage=stage,
        stages=options.stages,
        data_parallel=peer,
        data_parallel_size=options.peers,
        scheduler=scheduler,
        scaler=torch.amp.GradScaler(torch.device(options.device).type, **options.scaler) if options.scaler else None,
        on_event=functools.partial(note, options, kept),
        **grouped(options.copies, lighthouse=options.lighthouse),
    )
    watch_copies(options, copies)
    kept["tokens"] = count_tokens(chunks, kept) if options.tells_experts else {}

    def die_in_step(module: nn.Module, inputs: Any) -> None:
        is_last_call = module.calls % options.microbatches == options.kill_microbatch
        if kept["attempt"] == options.kill_in_step and is_last_call:
            others = [] if options.kill_with is None else [f"in-step-{options.kill_with}"]
            last, first = f"forward-{kept['attempt']}-{module.calls + 2}", (stage - 1) * options.peers
            others += [f"{last}-{first + each}" for each in range(options.peers * options.tells_forwards)]
            meet(options.folder, f"in-step-{options.rank}", others)
            die_if(options, True, kept["attempt"])

    reach_in_store(options)
    reach_reduction(options, chunks)
    chunks[0].register_forward_pre_hook(die_in_step)
    if options.tells_forwards:
        name = lambda module: f"forward-{kept['attempt']}-{module.calls}-{options.rank}"  # noqa: E731
        chunks[0].register_forward_hook(lambda module, *_: meet(options.folder, name(module), []))
    for attempt in copies.steps(options.steps):
        kept["attempt"] = attempt.number
        if attempt.number == options.stops:
            copies.stop()
        with attempt:
            if kept.pop("is_connected", False):
                connected(options, copies)
            run_attempt(options, attempt, kept["schedule"])
        if attempt.committed:
            tell_step(options, copies, kept)
    if options.trace:
        copies.write_trace(Path(options.folder) / f"{options.rank}.json")
    write(
        options,
        "done",
        step=copies.step,
        compared=kept.get("compared", 0),
        different=kept.get("different", []),
        digests=digests(copies),
        weights=[parameter.double().sum().item() for parameter in chunks.parameters()],
        scale=copies.loss_scale,
        rate=optimizer.param_groups[0]["lr"],
        resent=copies.forwards.resent,
        computed=copies.forwards.computed,
        forwards=sum(chunk.forwards for chunk in chunks),
        backwards=sum(chunk.backwards for chunk in chunks),
        sent_bytes=copies._driver.courier.sent_bytes,
        sent=kept.get("sent", {}),
        tokens=copies._state.expert_load.tokens[0].tolist(),
        expert_bytes=max((unit.nbytes for unit in copies._state.own.units if unit.layer is not None), default=0),
        state_bytes=sum(unit.nbytes for unit in copies._state.own.units),
    )


def tell_step(options: Options, copies: evermoe.PipelineSession, kept: dict[str, Any]) -> None:
    """Write what the step was, which is taken."""
    write(
        options,
        "step",
        step=copies.step,
        loss=copies.loss / options.factor,
        squares=kept["squares"],
        norm=copies.grad_norm,
        logged=copies._driver.localised.log.nbytes,
        plans=copies._driver.window_planner.plans,
        summary=copies._driver.window_planner.summary,
        copied=copies._driver.snapshot_schedule.begun,
        sent=Counter(each.when for each in list(copies._driver.courier.sent)),
        **(about_experts(copies, kept["tokens"]) if options.tells_experts else {}),
    )


def main(options: Options) -> None:
    """As a child of the tests' fork server: what is printed goes to a file."""
    log = os.open(Path(options.folder) / f"{options.name}.{os.getpid()}.log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    torch.set_num_threads(1)
    train(options)
