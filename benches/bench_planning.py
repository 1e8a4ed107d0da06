"""The planners, compared with their peers, in one run on one thread.

    python benches/bench_planning.py [--only placement drift ...] [--json PATH] [--slots 9 16 18] [--runs 5]

- placement: replicas and nodes for all layers, from loads of five shapes. "even" is the busiest node's load over the
  mean, with the tokens of an expert split evenly over its replicas; "balanced" is the same with the split that
  minimizes the load of the busiest node. "P(1)" and "P(2)" are the fractions of all losses of one and two nodes that
  leave every expert a replica, by enumeration. "nodes" is the smallest number of distinct nodes of an expert. "bound"
  is the least imbalance that the replicas of `allocate` can have with an even split, by the pigeonhole principle: of
  the k * N + 1 heaviest replicas, some node has k + 1. Where two experts have 87 % of the load and nodes have 9 slots,
  these experts have 17 replicas each, 34 on 32 nodes. Some node has two of them, which is 1.64 times the mean, and
  seven cold ones, 1.75 together. With 18 slots they have 34 replicas each, and some nodes have three. "EPLB" loops over
  elements of tensors, as published; "EPLB lists" loops over Python numbers.
- drift: 20 times all loads change by a factor exp(0.05 * normal), and all layers are placed again. "moved" is the
  fraction of the replicas that a node must fetch. "over bound" is the worst imbalance over the bound above; EPLB has
  other replicas and can be below. EPLB plans from scratch; `migrate` numbers its nodes so that the fewest replicas
  move.
- copies, survival, split, selection, migration, chunks: see the functions.

The candidates run in turns, so that a slow moment of the machine affects all of them. Each value is the median after a
warm-up, in milliseconds or microseconds. Every result is checked; no assertion depends on time.
"""

import argparse
import functools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from evermoe.planning import allocate, migrate, place, recovery_probability, schedule, split_tokens
from evermoe.planning.dispatch import imbalance
from evermoe.planning.holders import copy_holders, training_copy_holders
from evermoe.planning.selection import select_experts
from evermoe.planning.survival import Survival, copy_recovery_probability
from evermoe.planning.windows import Span, StepProfile, find_windows
from peers import eplb

NODES, EXPERTS, LAYERS = 32, 256, 58
DRIFTS = 20
Record = dict[str, Any]
Matrices = list[NDArray[np.int64]]


def measure(candidates: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Return the median milliseconds of each function, in turns. Functions of half a second or more run three times."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for run in range(-1, runs):
        for name, function in candidates.items():
            if run >= 3 and times[name][0] > 500:
                continue
            start = time.perf_counter()
            function()
            if run >= 0:
                times[name].append((time.perf_counter() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def timed(function: Callable[[], Any], runs: int) -> tuple[float, Any]:
    """Return the median time of one function, and its result."""
    return measure({"it": function}, runs)["it"], function()


def shuffled(shares_E: NDArray[np.float64], layers: int, seed: int) -> NDArray[np.float64]:
    """Return the same shares for each layer, each in another order and with a million tokens."""
    random = np.random.default_rng(seed)
    return np.stack([random.permutation(shares_E) for _ in range(layers)]) * (1e6 / shares_E.sum())


def loads(layers: int, experts: int) -> dict[str, NDArray[np.float64]]:
    """Return the tokens of each expert, `[L, E]`, by the shape of the load."""
    ranks_E = np.arange(1, experts + 1)
    normal_LE = np.random.default_rng(0).standard_normal((layers, experts))
    lognormal_LE = np.exp(normal_LE)
    return {
        "uniform": np.full((layers, experts), 1e6 / experts),
        "lognormal": lognormal_LE * (1e6 / lognormal_LE.sum(1, keepdims=True)),
        "Zipf 0.5": shuffled(ranks_E**-0.5, layers, 1),
        "Zipf 1.0": shuffled(ranks_E**-1.0, layers, 2),
        "87 % on two": shuffled(np.where(ranks_E <= 2, 0.87 / 2, 0.13 / (experts - 2)), layers, 3),
    }


def evermoe(policy: str, load_LE: NDArray[np.float64], slots: int, previous: Matrices | None = None) -> list[Any]:
    """Place each layer."""
    least = min(2, NODES * slots // load_LE.shape[1])
    placements = []
    for layer, load_E in enumerate(load_LE):
        before = None if previous is None else previous[layer]
        # Maximum rank overlap, and its numbers of replicas, do not depend on the previous placement.
        now = None if before is None or policy == "mro" else before.sum(0)
        replicas_E = allocate(load_E, NODES, slots, least, now)
        placements.append(place(replicas_E, NODES, slots, policy, load_E, before))
    return placements


OURS = ("balanced", "safest", "mro")
PEERS = {
    "EPLB": functools.partial(eplb.eplb, in_tensors=True),
    "EPLB lists": eplb.eplb,
    "SGLang": eplb.snake,
}


def placement(arguments: argparse.Namespace) -> Iterator[Record]:
    """Place all layers, by slots, load and planner."""
    for slots in arguments.slots:
        for shape, load_LE in loads(LAYERS, EXPERTS).items():
            tensor_LE = torch.from_numpy(load_LE).float()
            candidates: dict[str, Callable[[], Any]] = {}
            for policy in OURS:
                candidates[policy] = functools.partial(evermoe, policy, load_LE, slots)
            for name, peer in PEERS.items():
                candidates[name] = functools.partial(peer, tensor_LE, NODES, slots)
            bound = max(even_bound(load_E, slots) for load_E in load_LE)
            ms = measure(candidates, arguments.runs)
            for name, plan in candidates.items():
                found = plan()
                matrices = found.numpy() if name in PEERS else [checked(one) for one in found]
                setting = {"slots": slots, "load": shape, "planner": name}
                times = {"ms": ms[name], "us a layer": ms[name] * 1e3 / LAYERS}
                yield {**setting, **times, "bound": bound, **quality(matrices, load_LE, slots)}


def checked(placement: Any) -> NDArray[np.int64]:
    """Check the probability of survival in the reason. Return the matrix."""
    reason = placement.reason
    if reason.failures <= 2:
        assert abs(reason.survival - survived(placement.matrix, reason.failures)) < 1e-9, reason
    return placement.matrix


def quality(matrices: Matrices, load_LE: NDArray[np.float64], slots: int) -> Record:
    """Check the placements of all layers. Return their balance and survival."""
    for matrix_NE in matrices:
        assert (matrix_NE.sum(1) == slots).all(), "a node has more or fewer replicas than slots"
        assert (matrix_NE.sum(0) > 0).all(), "an expert has no replica"
    layers = list(zip(matrices, load_LE, strict=True))
    even = [imbalance(*layer) for layer in layers]
    return {
        "even mean": statistics.fmean(even),
        "even worst": max(even),
        "balanced worst": max(imbalance(*layer, "balanced") for layer in layers),
        "P(1)": statistics.fmean(survived(matrix_NE, 1) for matrix_NE in matrices),
        "P(2)": statistics.fmean(survived(matrix_NE, 2) for matrix_NE in matrices),
        "nodes": min(int((matrix_NE > 0).sum(0).min()) for matrix_NE in matrices),
    }


def survived(matrix_NE: NDArray[np.int64], failures: int) -> float:
    """Return the fraction of all losses of one or two nodes that leave every expert a replica, by enumeration."""
    held_NE = (matrix_NE > 0).astype(np.int8)
    first, second = np.triu_indices(len(held_NE), 1)
    lost_XE = held_NE if failures == 1 else held_NE[first] + held_NE[second]
    return 1 - (lost_XE == held_NE.sum(0)).any(1).mean()


def even_bound(load_E: NDArray[np.float64], slots: int) -> float:
    """Return the least imbalance of the replicas of `allocate` with an even split; see the top of this file."""
    replicas_E = allocate(load_E, NODES, slots, min(2, NODES * slots // len(load_E)))
    weights = -np.sort(-np.repeat(load_E / replicas_E, replicas_E))
    rest = [weights[len(weights) - slots + held :].sum() for held in range(1, slots + 1)]
    busiest = [weights[k * NODES - k : k * NODES + 1].sum() + rest[k] for k in range(slots)]
    return max(1.0, max(busiest) / load_E.sum() * NODES)


def drift(arguments: argparse.Namespace) -> Iterator[Record]:
    """Consecutive small changes of the load: the replicas that move, and the balance of the nodes."""
    for slots in arguments.slots:
        for shape, start_LE in loads(LAYERS, EXPERTS).items():
            for name in ("balanced", "mro", "EPLB lists"):
                random = np.random.default_rng(4)
                load_LE, before, figures = start_LE, None, []
                for _ in range(DRIFTS + 1):
                    start = time.perf_counter()
                    before, moved = again(name, load_LE, slots, before)
                    ms = (time.perf_counter() - start) * 1e3
                    even = [imbalance(*layer) for layer in zip(before, load_LE, strict=True)]
                    over = [one / even_bound(load_E, slots) for one, load_E in zip(even, load_LE, strict=True)]
                    figures.append((ms, moved, even, over))
                    load_LE = load_LE * np.exp(0.05 * random.standard_normal(load_LE.shape))
                times, moves, even, over = zip(*figures[1:], strict=True)
                yield {
                    "slots": slots,
                    "load": shape,
                    "planner": name,
                    "ms": statistics.median(times),
                    "moved % mean": 100 * float(np.mean(moves)) / (NODES * slots),
                    "moved % worst": 100 * float(np.max(moves)) / (NODES * slots),
                    "even mean": float(np.mean(even)),
                    "even worst": float(np.max(even)),
                    "over bound": float(np.max(over)),
                }


def again(
    name: str, load_LE: NDArray[np.float64], slots: int, before: Matrices | None
) -> tuple[Matrices, list[int | None]]:
    """Return the next placement of each layer, and the number of replicas that each fetches."""
    if name not in PEERS:
        found = evermoe(name, load_LE, slots, before)
        return [one.matrix for one in found], [one.reason.moved for one in found]
    matrices = list(PEERS[name](torch.from_numpy(load_LE).float(), NODES, slots).numpy())
    if before is None:
        return matrices, [None] * len(matrices)
    one_E = np.ones(load_LE.shape[1], np.int64)
    moved: list[int | None] = []
    for layer, matrix_NE in enumerate(matrices):
        plan = migrate(before[layer], matrix_NE, one_E)
        matrices[layer] = np.empty_like(matrix_NE)
        matrices[layer][plan.node_map] = matrix_NE
        moved.append(plan.nbytes)
    return matrices, moved


def copies(arguments: argparse.Namespace) -> Iterator[Record]:
    """Holders of two copies of everything on 10,000 nodes of one rank each, and the survival of two losses."""
    nodes = [f"node{number:05}" for number in range(10_000)]
    numbers = range(len(nodes))
    plans: dict[str, Callable[[], Any]] = {
        policy: functools.partial(copy_holders, nodes, 2, policy=policy) for policy in ("group", "mixed", "ring")
    }
    # 100 pipeline stages of 100 data-parallel ranks, optimizer state sharded.
    grid = [number // 100 for number in numbers], [number % 100 for number in numbers]
    plans["training"] = lambda: training_copy_holders(nodes, *grid, 2, zero_stage=1).optimizer
    for policy, plan in plans.items():
        ms, holders = timed(plan, arguments.runs)
        assert all(len(set(of_rank)) == 2 and of_rank[0] == rank for rank, of_rank in enumerate(holders)), policy
        found = copy_recovery_probability(holders, 2)
        pairs = {frozenset(of_rank) for of_rank in holders}
        assert abs(found.probability - (1 - len(pairs) / math.comb(len(nodes), 2))) < 1e-12, "P(2) is wrong"
        yield {"policy": policy, "nodes": len(nodes), "ms": ms, "P(2)": f"{found.probability:.6f}"}


def survival(arguments: argparse.Namespace) -> Iterator[Record]:
    """The probability that nothing is lost: 10,000 nodes with two copies each, and 256 random pairs on 32 nodes."""
    nodes = [f"node{number:05}" for number in range(10_000)]
    for policy in ("group", "ring"):
        holders = copy_holders(nodes, 2, policy=policy)
        for failures in (1, 2, 16, 500):
            ms, found = timed(functools.partial(copy_recovery_probability, holders, failures), arguments.runs)
            truth = closed_form(policy, len(nodes), failures)
            assert abs(found.probability / truth - 1) < 1e-9, "the probability differs from the closed form"
            yield survival_record(f"{policy} of 10,000", failures, ms, found)
    random = np.random.default_rng(8)
    held_NE = np.zeros((NODES, EXPERTS), np.int64)
    for expert in range(EXPERTS):
        held_NE[random.choice(NODES, 2, replace=False), expert] = 1
    for failures in (1, 2, 3, 4):
        ms, found = timed(functools.partial(recovery_probability, held_NE, failures), arguments.runs)
        if failures <= 2:
            assert abs(found.probability - survived(held_NE, failures)) < 1e-12, "it differs from enumeration"
        yield survival_record("256 pairs on 32", failures, ms, found)


def closed_form(policy: str, nodes: int, failures: int) -> float:
    """Return the fraction of choices of nodes without a pair, or without neighbours on a ring."""
    if policy == "group":
        safe = Fraction(math.comb(nodes // 2, failures) * 2**failures)
    else:
        safe = Fraction(nodes * math.comb(nodes - failures, failures), nodes - failures)
    return float(safe / math.comb(nodes, failures))


def survival_record(what: str, failures: int, ms: float, found: Survival) -> Record:
    shown = {"probability": f"{found.probability:.6g}", "error": f"{found.error:.2g}", "method": found.method}
    return {"copies": what, "failures": failures, "ms": ms, **shown}


def split(arguments: argparse.Namespace) -> Iterator[Record]:
    """One rank's part of a step's tokens: microseconds, and the busiest rank over the mean, over steps of Zipf 1.0.

    The load of each step is that of the placement times exp(0.3 * normal); 8192 choices of an expert on each rank.
    """
    for experts, ranks, slots in ((256, 32, 9), (64, 64, 4), (8, 4, 4)):
        random = np.random.default_rng(5)
        load_E = loads(1, experts)["Zipf 1.0"][0]
        least = min(2, ranks * slots // experts)
        matrix_NE = place(allocate(load_E, ranks, slots, least), ranks, slots, load=load_E).matrix
        steps = []
        for _ in range(10):
            shares_E = load_E * np.exp(0.3 * random.standard_normal(experts))
            steps.append(random.multinomial(8192, shares_E / shares_E.sum(), size=ranks).T.copy())
        for policy in ("even", "balanced"):
            ms, _ = timed(functools.partial(split_all, steps, matrix_NE, policy), arguments.runs)
            work_N = [work(tokens_EN, matrix_NE, policy) for tokens_EN in steps]
            uneven = [work.max() / work.mean() for work in work_N]
            setting = {"experts": experts, "ranks": ranks, "slots": slots, "split": policy}
            yield {**setting, "us": ms * 1e3 / len(steps), "mean": statistics.fmean(uneven), "worst": max(uneven)}


def split_all(steps: Matrices, matrix_NE: NDArray[np.int64], policy: str) -> None:
    for tokens_EN in steps:
        split_tokens(tokens_EN, matrix_NE, 0, policy)


def work(tokens_EN: NDArray[np.int64], matrix_NE: NDArray[np.int64], policy: str) -> NDArray[np.int64]:
    """Check that all tokens arrive at a rank with their expert. Return the tokens that each rank computes."""
    parts = [split_tokens(tokens_EN, matrix_NE, rank, policy) for rank in range(len(matrix_NE))]
    send_REN = np.stack([send_EN for send_EN, _ in parts])
    receive_RNE = np.stack([receive_NE for _, receive_NE in parts])
    assert (send_REN.transpose(2, 0, 1) == receive_RNE).all(), "the tokens sent differ from those received"
    assert (send_REN.sum(2) == tokens_EN.T).all(), "a token is lost"
    assert not receive_RNE.sum(1)[matrix_NE == 0].any(), "a token goes to a rank without its expert"
    return receive_RNE.sum((1, 2))


def selection(arguments: argparse.Namespace) -> Iterator[Record]:
    """The choice of experts to copy, 32 of each layer."""
    tokens_LE = loads(LAYERS, EXPERTS)["Zipf 1.0"].astype(np.int64)
    waiting_LE = np.random.default_rng(6).integers(0, 8, tokens_LE.shape)
    for policy in ("sequential", "load-aware", "budget"):
        extra = {"waiting": waiting_LE} if policy == "load-aware" else {}
        plan = functools.partial(select_experts, policy, tokens_LE, 7, experts_per_layer=32, **extra)
        ms, chosen = timed(plan, 10 * arguments.runs)
        assert sum(map(len, chosen)) == 32 * LAYERS, "some of the capacity is unused"
        assert all(layer == sorted(set(layer)) for layer in chosen), "an expert is chosen twice"
        yield {"policy": policy, "layers": LAYERS, "experts": EXPERTS, "K": 32, "us": ms * 1e3}


def migration(arguments: argparse.Namespace) -> Iterator[Record]:
    """Migration from one placement to an independent one, of a load that has drifted by 5 %."""
    for nodes, slots in ((32, 18), (512, 4), (10_000, 2)):
        random = np.random.default_rng(7)
        load_E = loads(1, EXPERTS)["Zipf 1.0"][0]
        old_NE, new_NE = (
            place(allocate(load * noise, nodes, slots, 1), nodes, slots, "spread").matrix
            for load, noise in ((load_E, 1.0), (load_E, np.exp(0.05 * random.standard_normal(EXPERTS))))
        )
        new_NE = new_NE[random.permutation(nodes)]
        one_E = np.ones(EXPERTS, np.int64)
        ms, plan = timed(functools.partial(migrate, old_NE, new_NE, one_E), arguments.runs)
        held_NE = old_NE[plan.node_map] > 0
        assert sorted(plan.node_map) == list(range(nodes)), "two rows are assigned to one node"
        assert plan.nbytes == ((new_NE > 0) & ~held_NE).sum(), "the transfers differ from the missing replicas"
        by_number = int(((new_NE > 0) & (old_NE == 0)).sum())
        percent = {"moved %": 100 * plan.nbytes / (nodes * slots), "by number %": 100 * by_number / (nodes * slots)}
        yield {"nodes": nodes, "experts": EXPERTS, "slots": slots, "ms": ms, **percent}


def chunks(arguments: argparse.Namespace) -> Iterator[Record]:
    """Chunks of 10,000 units, of one or of 10,000 sizes, in 1,000 windows of a profile of 20 steps."""
    spans = [Span(f"s{place}", "send", "network", place * 2e-3, 1e-3) for place in range(1000)]
    steps = [StepProfile(2.0, spans)] * 20
    ms, windows = timed(functools.partial(find_windows, steps), arguments.runs)
    yield {"what": "windows", "sizes": 0, "ms": ms, "steps": 0, "delay ms": 0.0}
    link, memory = schedule.Link(2e-5, 1.2e10), schedule.Memory(8 << 20, 8, schedule.Link(1e-5, 2e10))
    for sizes in (1, 10_000):
        nbytes = (1 << 20) + 16 * (np.random.default_rng(8).permutation(10_000) % sizes)
        pieces = [schedule.CopyItem(f"unit{unit}", int(size), [1]) for unit, size in enumerate(nbytes)]
        ends = [schedule.Receiver(1, windows, 1e-4)]
        for policy in schedule.CHUNK_POLICIES:
            plan = functools.partial(schedule.plan_chunks, pieces, windows, link, memory, policy=policy, receivers=ends)
            ms, found = timed(plan, arguments.runs)
            moved = sum(chunk.bytes for chunk in found.chunks)
            assert moved == nbytes.sum(), f"{moved} of {nbytes.sum()} bytes are planned"
            reason = found.reason
            delay = reason.delay_seconds * 1e3
            yield {"what": policy, "sizes": sizes, "ms": ms, "steps": reason.steps_per_version, "delay ms": delay}


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Record]]] = {
    "placement": placement,
    "drift": drift,
    "copies": copies,
    "survival": survival,
    "split": split,
    "selection": selection,
    "migration": migration,
    "chunks": chunks,
}


def show(records: Iterator[Record]) -> list[Record]:
    """Print records as a table, each when it is computed. Return them."""
    found = []
    for record in records:
        if not found:
            print("".join(f"{name:>{width(name)}}" for name in record))
        found.append(record)
        print("".join(f"{text(value):>{width(name)}}" for name, value in record.items()), flush=True)
    return found


def width(name: str) -> int:
    return (17 if name == "copies" else max(9, len(name))) + 3


def text(value: object) -> str:
    """Format a value: integers and words unchanged, other numbers with four digits or three decimals."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if value >= 1000 else f"{value:.3f}"


def main() -> None:
    """Print tables, and write JSON if `--json` is given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument(
        "--slots", type=int, nargs="+", default=[9, 16, 18], help="expert slots of each node, for placements"
    )
    parser.add_argument("--runs", type=int, default=5, help="runs of each candidate after a warm-up (%(default)s)")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    versions = {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
    print(f"{machine}, {', '.join(f'{name} {version}' for name, version in versions.items())}")
    result: Record = {"arguments": vars(arguments), "machine": machine, "versions": versions}
    for name in arguments.only:
        print(f"\n{name}: {PARTS[name].__doc__.split(chr(10), 1)[0]}")
        result[name] = show(PARTS[name](arguments))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
