"""Every planner says the same in every process: all ranks act on plans that each has computed for itself."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np

from evermoe import planning
from evermoe.planning import schedule
from evermoe.planning.dispatch import SPLITS, imbalance
from evermoe.planning.holders import copy_holders, training_copy_holders
from evermoe.planning.ledger import TokenLedger
from evermoe.planning.placement import POLICIES
from evermoe.planning.selection import select_experts, shard_modules
from evermoe.planning.survival import copy_recovery_probability
from evermoe.planning.windows import Span, StepProfile, find_windows

NODES = [f"n{rank // 2}" for rank in range(12)]


def plans() -> list[str]:
    rng = np.random.default_rng(5)
    said = []
    previous = None
    for load in rng.lognormal(size=(3, 24)):
        replicas = planning.allocate(load, 12, 5)
        racks = [list(range(first, first + 2)) for first in range(0, 12, 2)]
        for policy in POLICIES:
            for domains in (None, racks):
                placed = planning.place(replicas, 12, 5, policy, load, previous, domains)
                said.append(f"{policy} {placed.matrix.tolist()} {placed.reason}")
                said.append(repr(planning.recovery_probability(placed.matrix, 3, domains=domains)))
        matrix = planning.place(replicas, 12, 5, load=load).matrix
        if previous is not None:
            said += [repr(planning.migrate(previous, matrix, [64] * 24, domains)) for domains in (None, racks)]
        previous = matrix
        tokens = rng.integers(0, 50, (24, 12))
        for split in SPLITS:
            said.append(repr([planning.split_tokens(tokens, matrix, rank, split) for rank in range(12)]))
            said.append(repr(imbalance(matrix, load, split)))
    said.append(repr(planning.recovery_probability(previous, 3, samples=1000, seed=3)))
    for policy in ("mixed", "group", "ring"):
        holders = copy_holders(NODES, 2, policy=policy)
        said.append(f"{holders} {copy_recovery_probability(holders, 3, nodes=NODES)}")
    coordinates = [rank % 6 for rank in range(12)], [rank // 6 for rank in range(12)]
    said += [repr(training_copy_holders(NODES, *coordinates, 3, zero_stage=stage)) for stage in range(4)]
    ledger = TokenLedger(3, 8, experts_per_layer=2)
    for tokens in rng.integers(0, 90, (6, 3, 8)):
        ledger.add(tokens)
        for policy in ("sequential", "load-aware", "budget"):
            chosen = select_experts(policy, ledger.at_risk, ledger.checkpoint, experts_per_layer=2)
            said.append(f"{policy} {chosen}")
        ledger.copied(chosen)
    said.append(ledger.to_json())
    said.append(repr(shard_modules([900, 30, 411, 77], 3, [0, 500, 100])))
    said += copies(rng)
    said += schedules(rng)
    return said


def copies(rng: np.random.Generator) -> list[str]:
    units = [
        planning.CopyUnit(int(state), int(gradient), [int(rank)], float(tokens), bool(tokens % 3))
        for state, gradient, rank, tokens in rng.integers(1, 99, (60, 4)) % [99, 20, 12, 99]
    ]
    nodes = [planning.CopyNode(1e-4, rank // 2, 400, 100, 0.1, 0.1) for rank in range(12)]
    link = schedule.Link(1e-4, 900.0)
    found = [
        planning.choose_copies(units, nodes, network=link, host_link=link, step_seconds=1.0, replication=copies)
        for copies in (2, 3)
    ]
    return [repr(plan) for plan in found]


def schedules(rng: np.random.Generator) -> list[str]:
    starts = np.cumsum(rng.uniform(1, 3, 8))
    spans = [Span(f"s{place % 3}", "send", "network", start, 0.9) for place, start in enumerate(starts)]
    windows = find_windows([StepProfile(starts[-1] + 2, spans)])
    pieces = [schedule.CopyItem(f"u{unit}", int(nbytes), [1, 2]) for unit, nbytes in enumerate(rng.integers(1, 60, 9))]
    ends = [schedule.Receiver(rank, windows, 0.1 * rank) for rank in (1, 2)]
    said = [windows.to_json()]
    for policy in schedule.CHUNK_POLICIES:
        memory = schedule.Memory(40, 4, schedule.Link(0.01, 100.0))
        plan = schedule.plan_chunks(pieces, windows, schedule.Link(0.1, 90.0), memory, policy=policy, receivers=ends)
        said.append(plan.to_json())
    return said


def test_the_same_in_every_process():
    environment = os.environ | {"PYTHONHASHSEED": "12345"}
    other = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert other.stdout.splitlines() == [line.replace("\n", " ") for line in plans()]


if __name__ == "__main__":
    print("\n".join(line.replace("\n", " ") for line in plans()))
