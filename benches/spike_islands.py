"""Prototype of members that are groups of processes: islands of FSDP2, with experts across them, on today's engine.

    python benches/spike_islands.py [--islands 2] [--ranks 2] [--rounds 3] [--json PATH]

Every process is a member of one `evermoe.Session`, which trains only the experts. It places, protects, votes and
recovers as usual, with the island as the node. `fully_shard` wraps the dense part over the ranks of an island, and this
script does for it what a session would do. It sums gradients over the ranks of the same position in all islands before
the vote, updates after the session's update, and rebuilds the island's groups after every agreement.

Three runs are compared with one process that trains the same model on the same samples. The first has no failure. In
the second, all processes of the last island are killed mid-step. In the third, only one of them is killed, so that the
rest of the island must leave. Then complete runs alternate with runs of the same model replicated on all members.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import evermoe
from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.comm.lighthouse import start_lighthouse
from evermoe.comm.torch_groups import end_torch_groups, quick_groups
from evermoe.comm.waits import end_waits
from evermoe.errors import PeerLost
from evermoe.events import Update

BATCH = 32
LIMIT_SECONDS = 120
"""Maximum duration of a run."""
SKIPPED = 3
"""Number of steps at the start that are not measured."""
POINTS = ("forward", "reduce", "vote", "update")
"""Points at which processes die: before the second layer, before the dense sums, after them, and after the vote."""
ENDED = ("gloo/", "Application timeout caused pair closure")
"""Parts of gloo's messages if a wait was ended, by this process or by a peer. torch has no exception type for them."""
DIED, LEFT = -signal.SIGKILL, 3
"""Exit codes of a killed process, and of a process that leaves because its island has lost a process."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2, help="processes of an island (%(default)s)")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=3, help="dense blocks of 8 width² parameters, each with experts")
    parser.add_argument("--steps", type=int, default=14, help="steps of each run (%(default)s)")
    parser.add_argument("--kill-at", type=int, default=7, help="the step in which processes die (%(default)s)")
    parser.add_argument(
        "--kill-in", choices=POINTS, default=POINTS[0], help="point of that step: %(choices)s (%(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="pairs of timed runs; 0 for none (%(default)s)")
    parser.add_argument("--json", help="where to write the figures")
    options = parser.parse_args()
    if options.kill_at >= options.steps - 1:
        parser.error(f"--kill-at: expected a step before the last, {options.steps - 1}, got {options.kill_at}")
    return options


# ---- the model


class Block(nn.Module):
    """A dense block and its router: maps tokens `[T, H]` to tokens, and returns their experts and weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.router = evermoe.Router(width, 8, 2)

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_TH = x_TH + self.down(torch.relu(self.up(self.norm(x_TH))))
        routes = self.router(x_TH)
        return x_TH, routes.ids_TK, routes.weights_TK


class Model(nn.Module):
    """A model of blocks, each followed by experts."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.experts = nn.ModuleList(evermoe.Experts(evermoe.Expert(width, width), 8) for _ in range(layers))

    def forward(self, x_TH: Tensor, between: Any = lambda layer: None) -> Tensor:
        for layer, (block, experts) in enumerate(zip(self.blocks, self.experts, strict=True)):
            between(layer)
            x_TH, ids_TK, weights_TK = block(x_TH)
            x_TH = x_TH + experts(x_TH, ids_TK, weights_TK)
        return x_TH

    def loss(self, x_TH: Tensor, between: Any = lambda layer: None) -> Tensor:
        return (self(x_TH, between) - x_TH.sin()).square().mean()


def draw_data(width: int) -> Tensor:
    return torch.randn(256, width, generator=torch.Generator().manual_seed(1))


# ---- an island


class IslandIncomplete(RuntimeError):
    """A process of this island is lost, so that the others leave."""


class Island:
    """The dense part of a process, sharded over its island by FSDP2.

    Its units are local shards: plain parameters that share memory with those of FSDP2. So the optimizer's state
    outlives the wrapper, which is rebuilt with every group.

    Args:
        number: index of the island.
        position: rank of this process in it.
        size: number of ranks of an island.
        store: used by this island only; it may end with the island.
        model: the complete model, with its initial values.
    """

    def __init__(self, number: int, position: int, size: int, store: dist.Store, model: Model, options: Any) -> None:
        self.number, self.position, self.size, self._store = number, position, size, store
        self._options, self._model, self._generation = options, model, -1
        self._full = [parameter.detach() for parameter in model.blocks.parameters()]
        self.shards: list[nn.Parameter] = []
        self._optimizer: evermoe.optim.AdamW | None = None
        self._peers: list[int] = []
        self.step = 0
        self.rebuilds: list[float] = []

    def drop_alone(self, reason: str) -> None:
        """End waits in the island's group. The session calls this, as the group is linked to its own."""
        if dist.is_initialized():
            end_waits(dist.group.WORLD, self.position, self.size)

    def connect(self, session: evermoe.Session) -> None:
        """Reconnect the island if the members have changed, and wrap the model over it. Collective."""
        if self._generation == session.generation:
            return
        seats = gather_json(session.group, [self.number, self.position])
        if sum(number == self.number for number, _ in seats) < self.size:
            raise IslandIncomplete(f"island {self.number} has lost a process")
        began = time.perf_counter()
        self._peers = [rank for rank, (_, position) in enumerate(seats) if position == self.position]
        limit = timedelta(seconds=10)
        end_torch_groups()
        with quick_groups(limit, threading.Event()):
            store = dist.PrefixStore(str(session.generation), self._store)
            dist.init_process_group("gloo", store=store, rank=self.position, world_size=self.size, timeout=limit)
        self._shard()
        self._generation = session.generation
        self.rebuilds.append(time.perf_counter() - began)

    def _shard(self) -> None:
        mesh = init_device_mesh("cpu", (self.size,))
        blocks = nn.ModuleList(Block(self._options.width) for _ in range(self._options.layers))
        if not self.shards:
            for parameter, value in zip(blocks.parameters(), self._full, strict=True):
                parameter.data.copy_(value)
            self._full = []
        for block in blocks:
            fully_shard(block, mesh=mesh)
            block.set_gradient_divide_factor(1.0)  # the session's weights turn the sums into means
            block.set_force_sum_reduction_for_comms(True)  # gloo does not support sums of multiples
        self._model.blocks = blocks
        locals_ = [parameter.to_local().detach() for parameter in blocks.parameters()]
        if not self.shards:
            self.shards = [nn.Parameter(each) for each in locals_]
            self._optimizer = evermoe.optim.AdamW(self.shards, lr=1e-3)
        for shard, local in zip(self.shards, locals_, strict=True):
            if shard.data_ptr() != local.data_ptr():
                local.copy_(shard.detach())
                shard.data = local

    def reduce(self, group: Group) -> None:
        """Sum the shards' gradients over the ranks of this position, in rank order. Collective over all members."""
        for shard, parameter in zip(self.shards, self._model.blocks.parameters(), strict=True):
            shard.grad, parameter.grad = parameter.grad.to_local(), None
        flat = torch.cat([shard.grad.reshape(-1) for shard in self.shards])
        counts = [len(flat) * (rank in self._peers and rank != group.rank) for rank in range(group.size)]
        others = iter(group.all_to_all(flat.repeat(len(self._peers) - 1), counts, counts).split(len(flat)))
        parts = [flat if rank == group.rank else next(others) for rank in self._peers]
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        for shard, part in zip(self.shards, total.split([s.numel() for s in self.shards]), strict=True):
            shard.grad.copy_(part.view_as(shard))

    def follow(self, step: int) -> None:
        """Take the step that the session has taken. The session may have learnt of the step only in a recovery."""
        if step == self.step + 1:
            self._optimizer.step()
            self.step = step
        if step != self.step:
            raise RuntimeError(f"the dense part is at step {self.step}, the experts are at step {step}")


# ---- processes


def work(options: argparse.Namespace, kind: str, victims: list[int], member: dict[str, Any], me: int) -> None:
    """Train one process, and write its results."""
    torch.set_num_threads(1)
    number, position = divmod(me, options.ranks)
    folder = Path(member.pop("folder"))
    Path(folder, f"{me}.pid").write_text(str(os.getpid()))
    model, data = Model(options.width, options.layers), draw_data(options.width)
    island = None
    if kind == "islands":
        store = dist.FileStore(str(folder / f"store-{number}"), -1)
        island = Island(number, position, options.ranks, store, model, options)

    def die(point: str, number: int) -> None:
        """Kill all victims, if this process is one of them."""
        if me in victims and (point, number) == (options.kill_in, options.kill_at):
            for each in victims:
                os.kill(int((folder / f"{each}.pid").read_text()), signal.SIGKILL)

    own = model if island is None else model.experts
    trained = evermoe.Session(
        own,
        evermoe.optim.AdamW(own.parameters(), lr=1e-3),
        evermoe.ElasticSampler(len(data), batch_size=BATCH),
        membership=evermoe.Membership(node=f"island{number}", **member),
        on_event=lambda event: die("update", event.step) if isinstance(event, Update) else None,
    )
    if island is not None:
        trained.group.linked.append(island)  # type: ignore[arg-type]
    found: dict[str, Any] = {"losses": {}, "seconds": []}
    began = killed_at = 0.0
    for step in trained.steps(options.steps):
        now = time.perf_counter()
        found["seconds"] += [now - began] if step.number > SKIPPED else []
        began = now
        if step.number == options.kill_at and not killed_at:
            killed_at = now
        if step.number == options.kill_at + 1:
            found.setdefault("taken_after", now - killed_at)
        with step:
            try:
                train(trained, step, model, island, data, lambda point, number=step.number: die(point, number))
            except (IslandIncomplete, PeerLost):
                raise
            except RuntimeError as error:
                if not any(words in str(error) for words in ENDED):
                    raise  # this error did not end a wait in the island's group
                trained.group.drop(str(error))
                raise PeerLost(f"the island's group has failed: {error}") from None
        if island is not None and step.committed:
            island.follow(trained.step)
        if step.committed:
            found["losses"][step.number] = trained.loss
    if island is not None:
        island.follow(trained.step)
    found["recoveries"] = [
        [report.members, sum(report.seconds.values()), report.seconds["agree"]] for report in trained.reports
    ]
    write(folder / f"{me}", found, model, island)


def write(path: Path, found: dict[str, Any], model: Model, island: Island | None) -> None:
    """Write the results and the parameters of a process."""
    dense = list(model.blocks.parameters()) if island is None else island.shards
    found["rebuilds"] = [] if island is None else island.rebuilds
    found["bytes"] = 3 * sum(
        parameter.nbytes for parameter in dense
    )  # each of the two moments has the size of the weights
    experts = {f"{i} {e}": x.weights[row].detach() for i, x in enumerate(model.experts) for row, e in enumerate(x.ids)}
    torch.save({"dense": [each.detach() for each in dense], "experts": experts}, path.with_suffix(".pt"))
    path.with_suffix(".json").write_text(json.dumps(found))


def train(session: Any, step: Any, model: Model, island: Island | None, data: Tensor, pass_point: Any) -> None:
    """Compute a step up to the vote, and report each point that it reaches."""

    def between(layer: int) -> None:
        if layer == 1:
            pass_point("forward")

    if island is not None:
        island.follow(session.step)
        island.connect(session)
    step.backward(model.loss(data[step.indices], between))
    pass_point("reduce")
    if island is not None:
        island.reduce(session.group)
    pass_point("vote")


def run_process(*arguments: Any) -> None:
    try:
        work(*arguments)
    except IslandIncomplete:
        os._exit(LEFT)


def run(options: argparse.Namespace, kind: str, victims: list[int], address: str) -> tuple[dict[int, Any], list[int]]:
    """Run a job. Return the results and tensors of each surviving process, and the exit codes of all."""
    members = options.islands * options.ranks
    with tempfile.TemporaryDirectory() as folder:
        member = {
            "job": f"spike-{uuid.uuid4().hex[:8]}",
            "memory_dir": str(Path(folder, "memory")),
            "lighthouse": address,
            "members": members,
            "folder": folder,
        }
        context = multiprocessing.get_context("spawn")
        workers = [
            context.Process(target=run_process, args=(options, kind, victims, member, me)) for me in range(members)
        ]
        for each in workers:
            each.start()
        for each in workers:
            each.join(LIMIT_SECONDS)
            each.kill()
        found = {}
        for me in range(members):
            if Path(folder, f"{me}.json").exists():
                tensors = torch.load(Path(folder, f"{me}.pt"), weights_only=True)
                found[me] = json.loads(Path(folder, f"{me}.json").read_text()) | tensors
        return found, [each.exitcode for each in workers]


# ---- comparisons


def train_alone(options: argparse.Namespace) -> tuple[Model, list[float]]:
    """Train the same model on the same samples in this process, without a session. Return it and its losses."""
    model, data, losses = Model(options.width, options.layers), draw_data(options.width), []
    optimizer = evermoe.optim.AdamW(model.parameters(), lr=1e-3)
    sampler = evermoe.ElasticSampler(len(data), batch_size=BATCH)
    for _ in range(options.steps):
        optimizer.zero_grad()
        loss = model.loss(data[sampler.share(0, 1).indices])
        loss.backward()
        optimizer.step()
        sampler.advance()
        losses.append(loss.item())
    return model, losses


def compare(options: argparse.Namespace, found: dict[int, Any], alone: Model, losses: list[float]) -> dict[str, Any]:
    """Return the largest differences from training alone, and whether all survivors have the same bits."""
    dense = list(alone.blocks.parameters())
    survivors = sorted({me // options.ranks for me in found})
    seen: dict[str, Tensor] = {}
    worst, is_same = 0.0, True
    for island in survivors:
        parts = [found[island * options.ranks + position]["dense"] for position in range(options.ranks)]
        for number, (shards, expected) in enumerate(zip(zip(*parts, strict=True), dense, strict=True)):
            full = torch.cat(shards)
            worst = max(worst, float((full - expected.detach()).abs().max()))
            is_same &= torch.equal(seen.setdefault(f"dense {number}", full), full)
    for each in found.values():
        for name, row in each["experts"].items():
            layer, expert = map(int, name.split())
            worst = max(worst, float((row - alone.experts[layer].weights[expert].detach()).abs().max()))
            is_same &= torch.equal(seen.setdefault(f"expert {name}", row), row)
    assert len(seen) == len(dense) + 8 * options.layers, "the survivors lack some parameters"
    own = next(iter(found.values()))["losses"]
    # Survivors learn of this step in the recovery, which does not include its loss.
    without_loss = {str(options.kill_at)} if options.kill_in == "update" else set()
    assert {str(step) for step in range(options.steps)} - set(own) <= without_loss, (
        "the survivors lack the loss of a step"
    )
    loss = max(abs(own[str(step)] - value) for step, value in enumerate(losses) if str(step) in own)
    return {"parameters": worst, "loss": loss, "same_bits": is_same, "moved": moved(options, alone)}


def moved(options: argparse.Namespace, alone: Model) -> float:
    """Return the largest change of a parameter in all of training, as a scale for the differences."""
    before = Model(options.width, options.layers).parameters()
    return max(float((a - b).detach().abs().max()) for a, b in zip(before, alone.parameters(), strict=True))


def main() -> None:
    options = parse()
    lighthouse = start_lighthouse(heartbeat_timeout=1, join_timeout=30)
    members = options.islands * options.ranks
    last = list(range(members - options.ranks, members))
    result: dict[str, Any] = {"correct": {}}
    try:
        alone, losses = train_alone(options)
        for name, victims in {"no failure": [], "an island dies": last, "one process dies": last[:1]}.items():
            found, codes = run(options, "islands", victims, lighthouse.address())
            expected = [0] * members if not victims else [0] * (members - options.ranks)
            expected += [DIED if me in victims else LEFT for me in last] if victims else []
            if codes != expected:
                raise SystemExit(f"{name}: expected exit codes {expected}, got {codes}")
            once = result["correct"][name] = compare(options, found, alone, losses)
            first = found[0]
            once |= {"recoveries": first["recoveries"][1:], "taken_after": first["taken_after"]}
            print(
                f"{name}: largest difference from one process: parameters {once['parameters']:.1e} (largest change by "
                f"training {once['moved']:.1e}), loss {once['loss']:.1e} of {losses[0]:.1f} to {losses[-1]:.1f}; same "
                f"bits on all survivors: {once['same_bits']}"
            )
            for size, seconds, agreeing in once["recoveries"]:
                print(f"  recovery to {size} members: {seconds:.2f} s, {agreeing:.2f} s of it to agree")
            if victims:
                print(f"  from the start of the failed step until it is taken: {once['taken_after']:.2f} s")
        if options.rounds:
            result |= measure(options, lighthouse.address())
    finally:
        lighthouse.shutdown()
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")


def measure(options: argparse.Namespace, address: str) -> dict[str, Any]:
    """Measure steps, bytes and recoveries with and without islands, in alternating runs; the last island dies."""
    members = options.islands * options.ranks
    last = list(range(members - options.ranks, members))
    steps: dict[str, list[float]] = {"replicated": [], "islands": []}
    taken: dict[str, list[float]] = {"replicated": [], "islands": []}
    held, rebuilds = {}, []
    for _ in range(options.rounds):
        for kind, medians in steps.items():
            found, _ = run(options, kind, [], address)
            medians.append(statistics.median(s for each in found.values() for s in each["seconds"]))
            held[kind] = max(each["bytes"] for each in found.values())
            rebuilds += [s for each in found.values() for s in each["rebuilds"]]
            found, _ = run(options, kind, last, address)
            taken[kind].append(found[0]["taken_after"])
    for name, values, unit in (("step", steps, 1e3), ("step in which the island dies", taken, 1.0)):
        ratios = [b / a for a, b in zip(values["replicated"], values["islands"], strict=True)]
        usual = [statistics.median(each) * unit for each in values.values()]
        print(
            f"{name}: replicated {usual[0]:.3g}, islands {usual[1]:.3g} {'ms' if unit > 1 else 's'}; islands ÷ "
            f"replicated {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )
    print(f"dense weights and moments of a process: replicated {held['replicated']}, islands {held['islands']} bytes")
    print(f"rebuilding an island's groups and wrapper: {1e3 * statistics.median(rebuilds):.0f} ms")
    return {"step_seconds": steps, "taken_after": taken, "bytes": held, "rebuilds": rebuilds}


if __name__ == "__main__":
    main()
