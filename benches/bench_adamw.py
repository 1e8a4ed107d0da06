"""AdamW against torch's, and against a loop that reads and writes the same memory and does no more, in one run.

    python benches/bench_adamw.py [--device cuda] [--json PATH] [--elements 8388608] [--threads 1 2] [--seconds 5]

"limit" is `p += g; m += g; v += g` in one compiled loop: as a step, it reads four arrays and writes three. The
candidates take turns, so that a slow moment of the machine hits all of them; figures are medians. "GB/s" counts each
array that is read or written once; "of limit" compares it with the loop's. Of a batch of 8 steps, the memory of p, m
and v is read and written once, so its steps can be quicker than the limit of a single one.
"""

import argparse
import json
import platform

import torch
from bench_ops import measure

from evermoe import ops

BATCH = 8


def state_of(elements, device):
    """Parameters, first and second moment."""
    random = torch.Generator().manual_seed(0)
    p = torch.randn(elements, generator=random).to(device)
    return p, p * 1e-3, p.square() * 1e-6


@torch.compile
def limit_loop(p, m, v, g):
    """Nothing but the memory traffic of a step."""
    p += g
    m += g
    v += g


def torch_step(elements, device, **kind):
    p, _, _ = state_of(elements, device)
    p.requires_grad_().grad = torch.full_like(p, 1e-3)
    optimizer = torch.optim.AdamW([p], **kind)
    return optimizer.step


def benches(elements, device):
    """Name → (function, steps that it takes, bytes that it moves)."""
    state, loop_state = state_of(elements, device), state_of(elements, device)
    wide = torch.full_like(state[0], 1e-3)
    narrow = wide.bfloat16()
    steps = torch.stack([ops.adamw_step(t=t, lr=1e-3) for t in range(1, BATCH + 1)])

    def ours(gradients):
        return lambda: ops.adamw_(*state, gradients, steps[: len(gradients)])

    zeros = torch.zeros_like(wide)
    return {
        "limit": (lambda: limit_loop(*loop_state, zeros), 1, 28 * elements),
        "evermoe": (ours([wide]), 1, 28 * elements),
        "evermoe, bf16 gradient": (ours([narrow]), 1, 26 * elements),
        "evermoe, no gradient": (ours([None]), 1, 24 * elements),
        "torch fused": (torch_step(elements, device, fused=True), 1, 28 * elements),
        "torch foreach": (torch_step(elements, device, foreach=True), 1, 28 * elements),
        "evermoe, batch of 8": (ours([wide.clone() for _ in range(BATCH)]), BATCH, (24 + 4 * BATCH) * elements),
        "evermoe, 8 in bf16": (ours([narrow.clone() for _ in range(BATCH)]), BATCH, (24 + 2 * BATCH) * elements),
        "evermoe, 8 of zeros": (ours([None] * BATCH), BATCH, 24 * elements),
    }


def run(arguments):
    """Yields one record per candidate and number of threads."""
    for threads in arguments.threads[:1] if arguments.device == "cuda" else arguments.threads:
        torch.set_num_threads(threads)
        candidates = benches(arguments.elements, arguments.device)
        functions = {name: function for name, (function, _, _) in candidates.items()}
        times = measure(functions, arguments.seconds, arguments.device)
        for name, (_, steps, nbytes) in candidates.items():
            speed = nbytes / times[name] / 1e3
            limit = candidates["limit"][2] / times["limit"] / 1e3
            rate = steps * arguments.elements / times[name]
            yield {
                "threads": threads,
                "name": name,
                "microseconds": times[name],
                "gigabytes_per_second": speed,
                "of_limit": speed / limit,
                "million_parameter_steps_per_second": rate,
            }


def main():
    """Prints a table; writes JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--elements", type=int, default=1 << 23)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=5.0, help="per number of threads")
    parser.add_argument("--json", help="where to write the figures")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not (torch.cuda.is_available() and ops.has_cuda_kernels()):
        print("skipped: no CUDA device, or no kernels in this build")
        return
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
    print(f"torch {torch.__version__}, {where}, {arguments.elements} elements")
    print(f"{'candidate':<24}{'threads':>8}{'us':>10}{'GB/s':>8}{'of limit':>10}{'Mparam-steps/s':>16}")
    records = []
    for record in run(arguments):
        records.append(record)
        figures = f"{record['microseconds']:>10.0f}{record['gigabytes_per_second']:>8.1f}{record['of_limit']:>10.2f}"
        rate = record["million_parameter_steps_per_second"]
        print(f"{record['name']:<24}{record['threads']:>8}{figures}{rate:>16.0f}", flush=True)
    if arguments.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"arguments": vars(arguments), "versions": versions, "records": records}, file, indent=1)


if __name__ == "__main__":
    main()
