"""Simulated effective training time ratio of known models with a failure every 10 minutes, and what limits it.

    evermoe measure --out here.json
    python benches/bench_ettr.py --constants here.json [--models NAME ...] [--dense sharded] [--seeds 3] [--json PATH]

Each model trains on the number of nodes in `JOBS`, with two spare nodes; a lost node returns after 10 minutes. Costs:

- assumed: the defaults of `evermoe.simulate.Constants`, such as 15 s to detect a loss and 10 s to connect;
- measured: all constants from the file, including those of the network, memory and disk of the machine that wrote it;
- mixed: from the file, the times that a session takes to detect, agree, connect, survey and start, and the digests; for
  the rest, 100 Gbit/s, PCIe and a store of 1 GB/s per node are assumed;
- fast: as mixed, for nodes of 8 GPUs that have 400 Gbit/s and PCIe each.

A node has 8 GPUs, each with a process that checks what it fetches. For the GPTs it has one GPU, as in Lazarus.

The time of a step comes from the paper for the GPTs of Lazarus. For the others it is 6 FLOP for each active parameter
and token, at 40 % of the bfloat16 peak of 8 H100 per node. Groups of `restart` and `restart-groups` are as small as
those of Lazarus for the GPTs, and as small as the memory of the GPUs allows for the others. The load is even.
"""

import argparse
import json
import math
import statistics
from dataclasses import dataclass, replace
from pathlib import Path

from common import Table
from evermoe.planning.models import MODELS
from evermoe.simulate import (
    SCHEMES,
    Constants,
    Failure,
    Scenario,
    Workload,
    keeps_owners,
    read_constants,
    simulate_seeds,
)
from evermoe.simulate.scenario import SimulatedOptions

PEAK, UTILISATION, DEVICES = 989e12, 0.4, 8
"""FLOP/s of an H100 (bfloat16, dense), the fraction of it that training reaches, and devices per node."""
MEMORY = DEVICES * 80e9
"""Memory of the GPUs of a node, in bytes."""
SPARES, REPAIR = 2, 600.0
CLUSTER = ("network_latency_seconds", "network_bytes_per_second", "capture_bytes_per_second")
CLUSTER += ("store_write_bytes_per_second", "store_read_bytes_per_second")
"""Constants in which a cluster differs from the machine that measured."""


@dataclass(frozen=True)
class Job:
    """The job that trains a model."""

    nodes: int
    tokens: int
    """Tokens of a global batch."""
    top_k: int
    """Experts per token."""
    step_seconds: float | None = None
    """Seconds of a step as a paper states them. None: computed from the operations."""
    expert_parallel: int | None = None
    """Nodes of a group that holds all experts, as a paper states them."""
    devices: int = DEVICES
    """Devices per node."""

    def seconds(self, model):
        """Return the seconds of a step."""
        if self.step_seconds is not None:
            return self.step_seconds
        shape = MODELS[model]
        active = shape.dense_parameters + shape.layers * self.top_k * shape.expert_parameters
        return 6 * active * self.tokens / (self.nodes * DEVICES * PEAK * UTILISATION)

    def group(self, workload):
        """Return the nodes of a group: the smallest power of two whose memory holds the state."""
        if self.expert_parallel is not None:
            return self.expert_parallel
        return 1 << math.ceil(math.log2(max(workload.parameters * workload.state_bytes / MEMORY, 1)))


JOBS = {
    # Lazarus, sections 6.1 and 6.2: 10 GPUs as nodes, 4 x 1024 tokens each; 30 min less 5 x 30 s over 2926 and 1996
    # steps; 45 samples a second.
    "gpt-s-moe": Job(10, 40 * 1024, 1, 1650 / 2926, 2, 1),
    "gpt-m-moe": Job(10, 40 * 1024, 1, 40 / 45, 2, 1),
    "gpt-l-moe": Job(10, 40 * 1024, 1, 1650 / 1996, 4, 1),
    "mixtral-8x7b": Job(16, 1 << 22, 2),
    "mixtral-8x22b": Job(32, 1 << 22, 2),
    "qwen3-30b-a3b": Job(16, 1 << 22, 8),
    "qwen3-235b-a22b": Job(64, 1 << 22, 8),
    "deepseek-v3": Job(256, 15_360 * 4096, 8),  # arXiv 2412.19437, sections 3.1 and 4.2: 2048 GPUs, its largest batch
    "gpt-oss-20b": Job(16, 1 << 22, 4),
    "gpt-oss-120b": Job(32, 1 << 22, 4),
}
"""Nodes and batches without a source are assumed."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--constants", help="file written by evermoe measure (default: only assumed costs)")
    parser.add_argument("--models", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    parser.add_argument(
        "--dense",
        choices=("replicated", "sharded"),
        default="replicated",
        help="placement of dense optimizer state (%(default)s)",
    )
    parser.add_argument(
        "--mtbf", type=float, default=600.0, help="mean seconds between failures in the cluster (%(default)s)"
    )
    parser.add_argument("--hours", type=float, default=12.0, help="simulated hours for each seed (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    if arguments.dense == "sharded":
        arguments.schemes = [name for name in arguments.schemes if keeps_owners(name)]
    columns = {"model": "<16s", "nodes": "5d", "step s": "6.2f", "costs": "10s"}
    columns |= {name: "11s" for name in arguments.schemes} | {"lost time of auto": "46s"}
    title = f"ETTR in percent, ± half of a 95 % interval, a loss every {arguments.mtbf:g} s, {arguments.dense}; "
    title += "largest causes of lost time of auto in percent"
    table = Table(title, columns)
    for model in arguments.models:
        for costs, constants in kinds(arguments.constants).items():
            table.add(**row(model, costs, constants, arguments))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(table.rows, indent=1) + "\n", encoding="utf-8")


def kinds(path):
    """Return constants by the name of their source."""
    assumed = Constants()
    if path is None:
        return {"assumed": assumed}
    measured = read_constants(path)
    mixed = replace(measured, **{name: getattr(assumed, name) for name in CLUSTER})
    rates = {
        name: DEVICES * getattr(assumed, name) for name in ("network_bytes_per_second", "capture_bytes_per_second")
    }
    rates["network_bytes_per_second"] *= 4  # 400 Gbit/s in place of 100
    fast = replace(mixed, **rates)
    return {"assumed": assumed, "measured": measured, "mixed": mixed, "fast": fast}


def row(model, costs, constants, arguments):
    """Return a row for a model and its costs: the ETTR of each scheme, and the causes of lost time of `auto`."""
    job = JOBS[model]
    workload = Workload.preset(model, step_seconds=job.seconds(model), tokens_per_step=job.tokens)
    failures = (Failure.poisson(mtbf_seconds=arguments.mtbf, repair_seconds=REPAIR),)
    scenario = Scenario(
        workload,
        nodes=job.nodes,
        spares=SPARES,
        devices=job.devices,
        days=arguments.hours / 24,
        failures=failures,
        constants=constants,
        options=SimulatedOptions(shard_optimizer=arguments.dense == "sharded"),
        expert_parallel=job.group(workload),
    )
    found = {
        "model": model,
        "dense": arguments.dense,
        "nodes": job.nodes,
        "step s": workload.step_seconds,
        "costs": costs,
    }
    samples = {name: simulate_seeds(scenario, name, seed=0, seeds=arguments.seeds) for name in arguments.schemes}
    for name, sample in samples.items():
        ettr = sample.interval("ettr")
        found[name] = f"{100 * ettr.mean:.1f}±{100 * ettr.half:.1f}"
    causes = lost(samples["auto"])[:3] if "auto" in samples else []
    return found | {
        "lost time of auto": ", ".join(f"{cause} {share:.2f}" for cause, share in causes),
        "lost percent": {name: dict(lost(sample)) for name, sample in samples.items()},
        "goodput percent": {name: 100 * sample.interval("goodput").mean for name, sample in samples.items()},
        "recovery seconds": {name: mean_recovery(sample) for name, sample in samples.items()},
    }


def lost(sample):
    """Return the causes of lost time and their percentage of all time, largest first."""
    spent = sample.seconds_by_cause()
    total = sum(spent.values())
    shares = ((cause, 100 * seconds / total) for cause, seconds in spent.items() if cause != "train")
    return sorted(shares, key=lambda each: -each[1])


def mean_recovery(sample):
    """Return the mean seconds from a loss until training resumes, or None without recoveries."""
    seconds = [each for outcome in sample.outcomes for each in outcome.recovery_seconds]
    return statistics.fmean(seconds) if seconds else None


if __name__ == "__main__":
    main()
