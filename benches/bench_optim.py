"""AdamW and SGD against torch's, and against loops that read and write the same memory and do no more, in one run.

    python benches/bench_optim.py [--device cuda] [--json PATH] [--elements 8388608] [--threads 1 2] [--seconds 10]

"limit" is `p += g; m += g; v += g` in one compiled loop: as a step of AdamW, it reads four arrays and writes three;
"SGD limit" has one array less. The candidates take turns, so that a slow moment of the machine hits all of them. On
the CPU, where others may take the machine's time, a figure is the lowest tenth's, and with one thread it is that
thread's own time; on CUDA it is the median. "of limit" compares the steps per second with the loop's; "GB/s" counts
each array that is read or written once. Of a batch of 8 steps, the memory of p, m and v is read and written once, so
its steps can be quicker than the limit of a single one; "8 of zeros" is near to what the arithmetic alone takes, which
is mostly two divisions and a root.
"""

import argparse
import json
import platform
import time

import torch
import torch._inductor.config
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


@torch.compile
def sgd_limit_loop(p, buffer, g):
    """The same of SGD with momentum."""
    p += g
    buffer += g


def lowest_tenth(functions, seconds):
    """Microseconds of each function, on the CPU: of the thread itself where there is one."""
    clock = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    for function in functions.values():  # compiled now
        function()
    times = {name: [] for name in functions}
    end = time.monotonic() + seconds
    while time.monotonic() < end or len(times[next(iter(times))]) < 3:
        for name, function in functions.items():
            start = clock()
            function()
            times[name].append((clock() - start) / 1e3)
    return {name: sorted(of_one)[len(of_one) // 10] for name, of_one in times.items()}


def torch_step(elements, device, optimizer=torch.optim.AdamW, **kind):
    p, _, _ = state_of(elements, device)
    p.requires_grad_().grad = torch.full_like(p, 1e-3)
    return optimizer([p], **kind).step


def benches(elements, device):
    """Name → (function, steps that it takes, bytes that it moves)."""
    state, loop_state = state_of(elements, device), state_of(elements, device)
    wide = torch.full_like(state[0], 1e-3)
    narrow = wide.bfloat16()
    steps = torch.stack([ops.adamw_step(t=t, lr=1e-3) for t in range(1, BATCH + 1)])

    def ours(gradients):
        return lambda: ops.adamw_(*state, gradients, steps[: len(gradients)])

    zeros = torch.zeros_like(wide)
    p, buffer, _ = state_of(elements, device)
    sgd_row = ops.sgd_step(is_first=False, lr=1e-3, momentum=0.9, weight_decay=1e-4)[None]
    sgd = {"optimizer": torch.optim.SGD, "lr": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}
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
        "SGD limit": (lambda: sgd_limit_loop(*loop_state[:2], zeros), 1, 20 * elements),
        "evermoe SGD": (lambda: ops.sgd_(p, buffer, [wide], sgd_row), 1, 20 * elements),
        "torch SGD fused": (torch_step(elements, device, fused=True, **sgd), 1, 20 * elements),
    }


def run(arguments):
    """Yields one record per candidate and number of threads."""
    for threads in arguments.threads[:1] if arguments.device == "cuda" else arguments.threads:
        torch.set_num_threads(threads)
        torch._dynamo.reset()
        torch._inductor.config.cpp.threads = threads  # or the limit's loop keeps one thread
        candidates = benches(arguments.elements, arguments.device)
        functions = {name: function for name, (function, _, _) in candidates.items()}
        on_cuda = arguments.device == "cuda"
        times = measure(functions, arguments.seconds, "cuda") if on_cuda else lowest_tenth(functions, arguments.seconds)
        for name, (_, steps, nbytes) in candidates.items():
            speed = nbytes / times[name] / 1e3
            reference = "SGD limit" if "SGD" in name else "limit"
            rate = steps * arguments.elements / times[name]
            yield {
                "threads": threads,
                "name": name,
                "microseconds": times[name],
                "gigabytes_per_second": speed,
                "of_limit": steps * times[reference] / times[name],
                "million_parameter_steps_per_second": rate,
            }


def main():
    """Prints a table; writes JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--elements", type=int, default=1 << 23)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=10.0, help="per number of threads")
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
