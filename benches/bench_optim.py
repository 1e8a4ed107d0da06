"""AdamW, SGD and Muon, compared with torch's and with loops that only read and write the same memory, in one run.

    python benches/bench_optim.py [--device cuda] [--json PATH] [--elements 8388608] [--threads 1 2] [--seconds 10]

"limit" is `p += g; m += g; v += g` in one compiled loop: like a step of AdamW, it reads four arrays and writes three.
"SGD limit" has one array less. The candidates run in turns, so that a slow moment of the machine affects all of them.
On the CPU, which other programs may use, a value is the lowest tenth; with one thread it is that thread's own time. On
CUDA it is the median. "of limit" is the steps per second relative to the loop. "GB/s" counts each array that is read or
written once. A batch of 8 steps reads and writes p, m and v once, so that its steps can be faster than the limit of a
single one. "8 of zeros" is close to the time of the arithmetic alone, which is mostly two divisions and a root.

"one pass" clips a bfloat16 gradient, steps the float32 master and writes the bfloat16 weights; "separate passes" does
the same with `mul_`, the step and `copy_`. "÷ separate" is the quotient of the times.

Muon steps the matrices of 8 gated experts in one stack, and torch's the same matrices one by one. "÷ torch" is the
quotient of the times.
"""

import time

import torch
import torch._inductor.config

import evermoe
from common import Table, medians, parse, parser, take_turns, where
from evermoe.ops.optim import adamw_, adamw_step, sgd_, sgd_step

BATCH = 8
EXPERTS = evermoe.Expert(256, 512, gated=True), 8
MUON, TORCH_MUON = "evermoe Muon, experts", "torch Muon, matrices"
SEPARATE, ONE_PASS = "separate passes", "one pass"


def state_of(elements, device):
    """Return parameters, first and second moment."""
    random = torch.Generator().manual_seed(0)
    p = torch.randn(elements, generator=random).to(device)
    return p, p * 1e-3, p.square() * 1e-6


@torch.compile
def limit_loop(p, m, v, g):
    """Do the memory traffic of a step of AdamW, and no more."""
    p += g
    m += g
    v += g


@torch.compile
def sgd_limit_loop(p, buffer, g):
    """Do the memory traffic of a step of SGD with momentum, and no more."""
    p += g
    buffer += g


def quiet_times(functions, seconds, device):
    """Return the microseconds of each function: medians on a GPU, lowest tenths on the CPU."""
    if device == "cuda":
        return medians(take_turns(functions, seconds, device))
    clock = time.thread_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns
    times = take_turns(functions, seconds, device, clock)
    return {name: sorted(of_one)[len(of_one) // 10] for name, of_one in times.items()}


def torch_step(elements, device, optimizer=torch.optim.AdamW, **kind):
    p, _, _ = state_of(elements, device)
    p.requires_grad_().grad = torch.full_like(p, 1e-3)
    return optimizer([p], **kind).step


def muons(device):
    """Return the candidates for experts by name: (function, steps that it takes, bytes that it moves)."""
    layer = evermoe.Experts(*EXPERTS, device=device)
    stack = layer.weights
    stack.grad = torch.full_like(stack, 1e-3).normal_()
    matrices = []
    for row, gradient in zip(stack.detach(), stack.grad, strict=True):
        for matrix, part in zip(EXPERTS[0].matrices(row), EXPERTS[0].matrices(gradient), strict=True):
            matrices.append(torch.nn.Parameter(matrix.clone()))
            matrices[-1].grad = part.clone()
    ours, theirs = evermoe.optim.Muon([stack]), torch.optim.Muon(matrices)

    def step_experts(layer=layer):  # which must live: its weights are known as a stack of experts by that
        ours.step()

    return {MUON: (step_experts, 1, 20 * stack.numel()), TORCH_MUON: (theirs.step, 1, 20 * stack.numel())}


def benches(elements, device):
    """Return the candidates by name: (function, steps that it takes, bytes that it moves)."""
    state, loop_state = state_of(elements, device), state_of(elements, device)
    wide = torch.full_like(state[0], 1e-3)
    narrow = wide.bfloat16()
    steps = torch.stack([adamw_step(t=t, lr=1e-3) for t in range(1, BATCH + 1)])

    def ours(gradients):
        return lambda: adamw_(*state, gradients, steps[: len(gradients)])

    weights, gradient, clipped = torch.empty_like(narrow), narrow.clone(), adamw_step(t=1, lr=1e-3, clip=0.999)[None]

    def separate_passes():
        gradient.mul_(0.999)
        adamw_(*state, [gradient], steps[:1])
        weights.copy_(state[0])

    zeros = torch.zeros_like(wide)
    p, buffer, _ = state_of(elements, device)
    sgd_row = sgd_step(is_first=False, lr=1e-3, momentum=0.9, weight_decay=1e-4)[None]
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
        SEPARATE: (separate_passes, 1, (24 + 2 + 4 + 4 + 2) * elements),
        ONE_PASS: (lambda: adamw_(*state, [narrow], clipped, weights), 1, (24 + 2 + 2) * elements),
        "SGD limit": (lambda: sgd_limit_loop(*loop_state[:2], zeros), 1, 20 * elements),
        "evermoe SGD": (lambda: sgd_(p, buffer, [wide], sgd_row), 1, 20 * elements),
        "torch SGD fused": (torch_step(elements, device, fused=True, **sgd), 1, 20 * elements),
    }


def main():
    """Print a table, and write JSON if `--json` is given."""
    made = parser(__doc__, seconds=10.0)
    made.add_argument("--elements", type=int, default=1 << 23)
    arguments = parse(made)
    columns = {"candidate": "24s", "threads": "d", "us": "10.0f", "GB/s": "8.1f", "of limit": ".2f"}
    title = f"optim: torch {torch.__version__}, {where(arguments.device)}, {arguments.elements} elements"
    table = Table(title, columns | {"Mparam-steps/s": ".0f", "÷ separate": ".2f", "÷ torch": ".2f"})
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        torch._dynamo.reset()
        torch._inductor.config.cpp.threads = threads  # otherwise the loop of "limit" keeps one thread
        candidates = benches(arguments.elements, arguments.device) | muons(arguments.device)
        functions = {name: function for name, (function, _, _) in candidates.items()}
        times = quiet_times(functions, arguments.seconds, arguments.device)
        for name, (_, steps, nbytes) in candidates.items():
            limit = times["SGD limit" if "SGD" in name else "limit"]
            figures = {"us": times[name], "GB/s": nbytes / times[name] / 1e3, "of limit": steps * limit / times[name]}
            if "Muon" in name:
                quotient = {"÷ torch": times[MUON] / times[TORCH_MUON]} if name == MUON else {}
                table.add(candidate=name, threads=threads, us=times[name], **quotient)
                continue
            rate = {"Mparam-steps/s": steps * arguments.elements / times[name]}
            if name == ONE_PASS:
                rate["÷ separate"] = times[ONE_PASS] / times[SEPARATE]
            table.add(candidate=name, threads=threads, **figures, **rate)
    table.write(arguments)


if __name__ == "__main__":
    main()
