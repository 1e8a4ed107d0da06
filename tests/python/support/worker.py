"""A small training run as one real process, which kills, stops or fails itself where its options say.

Everything that happens is appended to a file, one JSON object a line: the events of the session, with the
digests of all held units whenever a version of the state is copied.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import evermoe
from evermoe._native import digest
from evermoe.events import Event
from evermoe.optim.combined import as_one
from evermoe.profile import Profiler, memory
from evermoe.session import buckets, call_checks
from support.flat_options import grouped
from support.optimizers import make_optimizer, make_scheduler

VOCABULARY, WIDTH, SAMPLES = 32, 16, 100
EVERYTHING = 1 << 60
"""A gate that lets every step pass."""
WRITTEN_SECONDS = 40.0
"""Until a part of a checkpoint is on disk."""


@dataclass
class Fault:
    """An action of the worker on itself when it comes to `point` for the `nth` time (in `step`, if given).

    `point`: an event of the session, "phase <name>", "read" (of its share), "forward" (between forward and backward),
    "bucket" (a sum as backward begins), "gradients" (a bucket is sent during it) or "late state" (optimizer state is
    sent in steps).
    `action`: kill, stop (until someone continues it), hang (until the job wakes it), slow (for `seconds`), raise, drop
    (its connections), fill (its node's shared memory), flood (the GPU's stream behind the next collective), damage
    (what it sends then, at "late state"), throttle (what its connections send), look (which copies here have steps to
    repeat) or flip (a bit of each copy that it keeps; `where` is that of `support.flips`).
    """

    point: str
    step: int | None = None
    action: str = "kill"
    nth: int = 1
    part: float = 0.0
    """At `chunk`: of the bytes, that must have been sent."""
    where: str = "state"
    seconds: float = 0.0


@dataclass
class Options:
    name: str
    folder: str
    lighthouse: str | None
    session: dict[str, Any]
    steps: int = 10
    batch_size: int = 12
    faults: list[Fault] = field(default_factory=list)
    shuffle: bool = True
    poison: dict[int, str] = field(default_factory=dict)
    """By step, what is not a number on this worker: its `loss`, or only a `gradient`. Or it has a `penalty`."""
    model: str = ""
    """One of transformers' models, of `support.hub`; otherwise `Model`: of a `balance`, `wide`, or as it is."""
    hub: str = ""
    """Instead, a folder of one of transformers' models, of which it reads its own units, in float32."""
    optimizer: str = "adamw"
    lr: float | None = None
    """Instead of the optimizer's own."""
    schedule: str | None = None
    gated: bool = False
    """Waits before each step until the job's gate lets it pass."""
    secret: str | None = None
    """The job's secret, as it knows it."""
    compiled: bool = False
    """Its model is one graph."""
    work: int = 0
    """Multiplications of matrices between forward and backward."""
    slow: float = 0.0
    slow_sample: float = 0.0
    """Seconds that each step takes longer on this worker."""
    late: float = 0.0
    """Seconds that it takes after each step."""
    forwards: list[list[int]] = field(default_factory=list)
    """[step, n]: from this step on, n forward passes in each."""
    narrow: int = 0
    """Steps with the complete vocabulary, then as many with three tokens of it, and so on; 0: always all."""
    trace: bool = False
    """Writes what the session saw in its latest profile, and what a profiler of the user's saw."""
    device: str = "cpu"
    """Where the model is."""
    deferred: bool = False
    """Its model is built without memory."""
    dtype: str = "float32"
    """Of the model's parameters."""
    full: dict[int, str] = field(default_factory=dict)
    """By the steps that are taken, the name of a folder to which it then writes the complete model."""
    bucket_bytes: int | None = None
    """Of gradients that are summed together during backward, instead of the session's own."""
    wrong: str = ""
    """The part of its model that computes wrongly: "head" or "expert"."""
    call_share: float | None = None
    """Part of a step that repeated calls may take, instead of the session's own."""
    free_bytes: int | None = None
    """Memory that its host has left, instead of what the system says."""
    waits_for_disk: bool = True
    """Whether no checkpoint is late: it waits before each step until one that is under way is written."""
    lineage: bool = False
    """Records what `support.lineage` needs to know which steps each expert has seen."""
    states: bool = False
    """Records what `support.states` knows of the copies with which replicas begin."""
    parts: int = 1
    """Parts of a share, whose gradients add up."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that it has besides the tests' own."""
    island: dict[str, Any] | None = None
    """Its island: see `support.islands`."""
    digests: bool = False
    """Records the digests of its units before each step."""
    network: dict[str, str] | None = None
    """The host that it runs on, if not the tests' own: see `support.hosts`."""

    @property
    def events(self) -> Path:
        return Path(self.folder) / f"{self.name}.{os.getpid()}.jsonl"

    @property
    def gate(self) -> Path:
        return Path(self.folder) / "gate"


class Model(nn.Module):
    """Two MoE layers of either kind between an embedding and a head, as small as they get."""

    def __init__(self, balance_rate: float | None = None, hidden: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first = evermoe.MoE(WIDTH, hidden, 6, top_k=2)
        if balance_rate:
            router = evermoe.Router(WIDTH, 6, 2, balance_rate=balance_rate)
            self.first = evermoe.MoE.of(router, evermoe.Experts(evermoe.Expert(WIDTH, 16), 6))
        self.second = evermoe.MoE(WIDTH, 16, 4, top_k=1, gated=True)
        self.norm = nn.BatchNorm1d(WIDTH, affine=False, momentum=0.0)  # a module with buffers alone
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        x = x + self.first(x)
        x = x + self.second(x)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())
        return loss + 0.01 * evermoe.load_balancing_loss(self)


def dataset() -> torch.Tensor:
    """int64 `[SAMPLES, 9]`."""
    return torch.randint(0, VOCABULARY, (SAMPLES, 9), generator=torch.Generator().manual_seed(1))


def make_model(name: str) -> nn.Module:
    if name == "balance":
        return Model(balance_rate=0.01)
    if name == "wide":
        return Model(hidden=4096)
    if name:
        from support.hub import elastic  # transformers takes seconds to import

        return elastic(name)
    return Model()


class Recorder:
    """Writes events, then lets the faults happen."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._file = os.open(options.events, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._seen = [0] * len(options.faults)
        self._last, self._has_updated = "", False
        self._copied_step = -1
        self._has_copied = threading.Condition()
        self.session: evermoe.Session | None = None
        self.computing = 0
        """The step that the script computes."""
        self._flips: Any = None
        self._damages = False

    def __call__(self, event: Event) -> None:
        name, fields = event.name, event.fields()
        if name in ("update", "skipped", "phase"):
            self._last = "phase" if name == "phase" else "update"
            self._has_updated |= name != "phase"
        more: dict[str, Any] = {}
        if name == "copy":
            assert self.session is not None
            tokens = {path: layer.tokens_E.tolist() for path, layer in self.session._state.layers.items()}
            more = {"after": self._last, "tokens": tokens, **self._state()}
        if name == "protection_planned":
            protection = self.session._protection  # type: ignore[union-attr]
            holders = {each.unit: [each.kind, each.primary, each.holders] for each in protection.plan.units}
            more = {"holders": holders, "active": protection.active}
        self.write(name, **fields, **more)
        if fields.get("phase") == "fetch" and self._has_updated:
            self.write("kept", **self._state())  # also after a recalled vote, which updates without a step's events
        if name == "protection_planned" and self._options.states:
            importlib.import_module("support.states").watch(self)  # this file also runs by itself, without the others
        with self._has_copied:
            if name == "copy":
                self._copied_step = fields["step"]
                self._has_copied.notify_all()
            elif name in ("chunk_sent", "snapshot_received"):  # other threads, which may be ahead of what is recorded
                self._has_copied.wait_for(lambda: self._copied_step >= fields["step"])
        part = fields["sent"] / fields["total"] if name == "chunk_sent" else 1.0
        self.fault(f"phase {fields['phase']}" if name == "phase" else name, fields.get("step"), part)

    def _state(self) -> dict[str, Any]:
        session = self.session
        assert session is not None
        digests, contents = {}, {}
        for unit in session._state.held() if session._config.membership.trains else ():
            data = torch.empty(session._state.catalog.by_name[unit].nbytes, dtype=torch.uint8)
            session._state.read(unit, data)
            digests[unit] = digest(data.numpy())
            if self._options.lineage:
                contents[unit] = self._content(unit, data)
        ledger = session._protection.ledger
        more: dict[str, Any] = {}
        if contents:
            each = [kind.experts_per_layer for kind in (ledger.selection, ledger.local)]
            more = {"contents": contents, "each": each, "ledger": json.dumps(ledger.to_fields())}
        rates = [group["lr"] for group in as_one(session.optimizer).param_groups]
        consumed = session.sampler.consumed
        return {"version": session.version, "digests": digests, "rates": rates, "consumed": consumed, **more}

    def _content(self, unit: str, data: torch.Tensor) -> int:
        """Digest without what the optimizer counts for all of a layer: a recovery brings that up to date."""
        for counted in self.session._state.catalog.by_name[unit].layer_scalars(data).values():
            counted.zero_()
        return digest(data.numpy())

    def write(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "pid": os.getpid(), "time": time.time(), **fields})
        os.write(self._file, line.encode() + b"\n")  # in one piece and at once, whatever happens next

    def fault(self, point: str, step: int | None, part: float = 1.0) -> None:
        for number, fault in enumerate(self._options.faults):
            if fault.point != point or fault.step not in (None, step) or part < fault.part:
                continue
            self._seen[number] += 1
            if self._seen[number] != fault.nth:
                continue
            self.write("fault", point=point, action=fault.action, at=step)
            self._carry_out(fault, step)

    def _carry_out(self, fault: Fault, step: int | None) -> None:
        if fault.action == "raise":
            raise ZeroDivisionError(f"asked for at {fault.point}")
        if fault.action == "damage":
            self._damages = True
        elif fault.action == "slow":
            time.sleep(fault.seconds)
        elif fault.action == "drop":
            self.session._membership.trainer_group.drop("asked for")  # type: ignore[union-attr]
        elif fault.action == "hang":
            while not (Path(self._options.folder) / "wake").exists():
                time.sleep(0.01)
        elif fault.action == "fill":
            from support import disks  # as below

            session = self._options.session
            disks.fill(disks.job_folder(session["memory_dir"], session["job"]) / self._options.name)
        elif fault.action == "flood":
            from support.flood import flood_behind_next_collective  # as below

            flood_behind_next_collective(self.session.group)  # type: ignore[union-attr]
        elif fault.action == "throttle":
            importlib.import_module("support.link_rate").limit_connections()
        elif fault.action == "flip":
            self.write("flipped", units=self._flipper().flip(fault.where), at=step)
        elif fault.action == "look":
            self.write("looked", behind=self._flipper().behind())
        else:
            os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)

    def hook(self) -> None:
        """Let faults happen in threads concurrent with training: sums and sends of gradients, or optimizer state."""
        assert self.session is not None
        self.session._membership.side_group.on_begin = lambda *_: self.fault("bucket", self.computing)
        if any(fault.point == "gradients" for fault in self._options.faults):
            from support.replay_faults import before_early_gradients  # as above

            before_early_gradients(lambda: self.fault("gradients", self.computing))
        share = self.session.sampler.share

        def share_or_fail(rank: int, size: int) -> Any:
            self.fault("read", self.session.step)  # type: ignore[union-attr]
            return share(rank, size)

        self.session.sampler.share = share_or_fail  # type: ignore[method-assign]
        late = self.session._state.late
        read = late.read

        def read_or_fail(unit: Any, version: int, out: torch.Tensor) -> None:
            self.fault("late state", None)
            read(unit, version, out)
            out[0] ^= self._damages
            self._damages = False

        late.read = read_or_fail  # type: ignore[method-assign]

    def _flipper(self) -> Any:
        if self._flips is None:
            from support.flips import Flipper  # this file also runs by itself, without the others

            assert self.session is not None
            self._flips = Flipper(self.session)
        return self._flips

    def watch(self) -> None:
        """Watch what arrives for the copies of this session's plan, if it will be flipped."""
        if any(fault.where == "log" for fault in self._options.faults):
            self._flipper().watch()

    def wait_at_gate(self, step: int) -> None:
        if not self._options.gated:
            return
        self.write("gate", step=step)
        while int(self._options.gate.read_text() or 0) <= step:
            time.sleep(0.005)


def compute(options: Options, model: nn.Module, tokens: torch.Tensor, step: int) -> None:
    """Keeps this process busy and its network idle, then runs the forward passes whose loss is not used."""
    time.sleep(options.slow + options.slow_sample * len(tokens))
    matrix = torch.full((256, 256), 1e-3)
    for _ in range(options.work):
        matrix = matrix @ matrix
    counts = [count for first, count in options.forwards if first <= step]
    with torch.no_grad():
        for _ in range((counts[-1] if counts else 1) - 1):
            model(tokens)


def poisoned(loss: torch.Tensor, model: nn.Module, kind: str | None) -> torch.Tensor:
    """The loss, with what is to be not a number, or a penalty of the weights."""
    if kind == "penalty":
        return loss + 1e-2 * torch.stack([each.square().sum() for each in model.parameters()]).sum()
    if kind == "loss":
        return loss * float("nan")
    if kind == "gradient":  # the root of zero, whose slope is infinite, times zero
        return loss + (0 * model.head.bias).abs().sum().sqrt()
    return loss


def write_traces(options: Options, session: evermoe.Session, profiler: Profiler) -> None:
    pacing, path = session._protection.snapshots.window_planner, Path(options.folder) / options.name
    pacing.write_trace(path.with_suffix(".session.json"))
    profiler.rank = session.group.rank
    profiler.write_trace(
        path.with_suffix(".user.json"), windows=pacing.windows, sent=session._protection.sent_messages()
    )


def train(options: Options) -> None:
    if options.call_share is not None:
        call_checks.SHARE = options.call_share
    if options.bucket_bytes is not None:
        buckets.BUCKET_BYTES = options.bucket_bytes
    if options.free_bytes is not None:
        memory.free_host_bytes = lambda: options.free_bytes  # type: ignore[assignment]
    record = Recorder(options)
    record.write("started", parent=os.getppid())
    try:
        _train(options, record)
    except BaseException as error:
        record.write("failed", error=type(error).__name__, message=str(error), units=getattr(error, "units", []))
        raise


def wait_until_written(session: evermoe.Session, waits: bool = True) -> None:
    """Waits until this member knows what became of a checkpoint or save: all do at the next vote, and none is late."""
    saving = session._driver.saving
    for write in (saving.checkpointer.under_way, saving.saver and saving.saver.under_way):
        assert write is None or not waits or write._task.is_over_within(WRITTEN_SECONDS)


def _train(options: Options, record: Recorder) -> None:
    torch.set_num_threads(1)
    if options.secret is not None:
        os.environ["EVERMOE_SECRET"] = options.secret
    with evermoe.deferred(device=options.device) if options.deferred else contextlib.nullcontext():
        model = make_model(options.model)
    model, weights = importlib.import_module("support.hub").open_folder(options.hub) if options.hub else (model, None)
    if not any(parameter.is_meta for parameter in model.parameters()):  # else deferred, and large
        model = model.to(options.device, getattr(torch, options.dtype))
    mesh = importlib.import_module("support.islands").divide(model, options.island, record) if options.island else None
    data = dataset().to(options.device)
    optimizer = make_optimizer(options.optimizer, model)
    if options.lr is not None:
        optimizer.param_groups[0]["lr"] = options.lr
    record.session = session = evermoe.Session(
        model,
        optimizer,
        evermoe.ElasticSampler(SAMPLES, options.batch_size, shuffle=options.shuffle),
        scheduler=make_scheduler(options.schedule, optimizer),
        on_event=record,
        weights=weights,
        mesh=mesh,
        **grouped(options.session, lighthouse=options.lighthouse),
    )
    record.hook()
    if options.wrong:
        importlib.import_module("support.wrong_products").spoil(model, options.wrong)
    if options.compiled:
        model.compile(fullgraph=True, backend="aot_eager")
    is_copy = bool(options.island and options.island["is_copy"])
    profiler = Profiler(model, keep=options.steps)
    if options.trace:
        profiler.attach()
    for step in profiler.steps(session.steps(options.steps)):
        record.wait_at_gate(step.number)
        wait_until_written(session, options.waits_for_disk)
        if step.number == 0:
            record.watch()
        generation, indices = session.generation, step.indices.tolist() if step.weight and not is_copy else []
        state = {"rank": session.group.rank} | (record._state() if options.digests else {})
        record.write("share", step=step.number, generation=generation, indices=indices, **state)
        record.computing = step.number
        with step:
            for part in step.micro_batches(options.parts):
                tokens = data[part]
                if options.narrow and step.number // options.narrow % 2:
                    tokens = tokens % 3
                loss = model(tokens)
                compute(options, model, tokens, step.number)
                record.fault("forward", step.number)
                step.backward(poisoned(loss, model, options.poison.get(step.number)))
        if step.committed and session.step in options.full:
            importlib.import_module("support.complete_model").write_complete(options, session, record)
        time.sleep(options.late)
        pacing = session._protection.snapshots.window_planner
        record.write(
            "paced",
            step=step.number,
            plans=pacing.plans,
            summary=pacing.summary,
            seconds=pacing.speeds.step_seconds,
            budgets=pacing.budgets,
        )
    profiler.detach()
    if options.trace:
        write_traces(options, session, profiler)
    record.write("done", step=session.step, uses_nccl=session.group.nccl is not None, **record._state())


def main(options: Options) -> None:
    """As a child of the tests' fork server: what is printed goes to a file."""
    log = os.open(Path(options.folder) / f"{options.name}.{os.getpid()}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= options.environment
    if options.network is not None:
        from support.hosts import enter  # this file also runs by itself, without the others

        enter(options.network)
    train(options)


if __name__ == "__main__":
    fields = json.loads(sys.argv[1])
    fields["faults"] = [Fault(**fault) for fault in fields["faults"]]
    train(Options(**fields))
