"""Dispatch ops against plain torch and against a copy of the same bytes, in one run.

    python benches/bench_ops.py [--device cuda] [--json PATH] [--tokens 8192 65536] [--hidden 1024] [--experts 8 64]

"copy" is `Tensor.copy_` of as many bytes into memory that is already mapped, with as many threads: of the ids
for the plan, of the rows else. The candidates take turns, so that a slow moment of the machine hits all of
them; the figure is the median. A ratio below 1 means: faster than the other. `permute` allocates its result, and a
large one is fresh pages each time; `_out` ops do not. "call" is the histogram of no ids: what any call costs.
"""

import argparse
import itertools
import json
import platform
import statistics
import time

import torch

from evermoe import ops

raw = torch.ops.evermoe


def measure(candidates, seconds, device):
    """Median time of each function, in microseconds; they take turns. On a GPU, launch to end."""
    times = {name: [] for name in candidates}
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for function in candidates.values():
        function()
    wait()
    end = time.perf_counter() + seconds
    rounds = 0
    while time.perf_counter() < end or rounds < 5:
        for name, function in candidates.items():
            start = time.perf_counter()
            function()
            wait()
            times[name].append((time.perf_counter() - start) * 1e6)
        rounds += 1
    return {name: statistics.median(values) for name, values in times.items()}


def plain_plan(ids_TK):
    """The usual torch way: a stable argsort, and its inverse."""
    row_ids = ids_TK.flatten().argsort(stable=True)
    positions = torch.empty_like(row_ids)
    positions[row_ids] = torch.arange(row_ids.shape[0], device=row_ids.device)
    return row_ids, positions.view(ids_TK.shape)


def benches(tokens, hidden, experts, top_k, dtype, device):
    """Yields (op, ours, plain torch or None, copy of the same bytes)."""
    random = torch.Generator().manual_seed(0)
    ids_TK = torch.randint(experts, (tokens, top_k), generator=random).to(device)
    x_TH = torch.randn(tokens, hidden, generator=random).to(device, dtype)
    weights_TK = torch.rand(tokens, top_k, generator=random).to(device)
    counts_E = ops.expert_histogram(ids_TK, experts)
    row_ids, positions_TK = ops.dispatch_plan(ids_TK, counts_E[:, None])
    rows_NH = ops.permute(x_TH, row_ids, positions_TK)
    ids_copy, rows_copy, out_TH = ids_TK.clone(), rows_NH.clone(), x_TH.clone()
    tokens_of_rows, flat, cast = row_ids // top_k, positions_TK.flatten(), weights_TK.to(dtype)

    def plan():
        counts_E = ops.expert_histogram(ids_TK, experts)
        return ops.dispatch_plan(ids_TK, counts_E[:, None])

    def plain_histogram_and_plan():
        return torch.bincount(ids_TK.flatten(), minlength=experts), plain_plan(ids_TK)

    def plain_unpermute():
        taken_TKH = rows_NH.index_select(0, flat).view(tokens, top_k, hidden)
        return torch.bmm(cast[:, None, :], taken_TKH)

    copy_ids, copy_rows = lambda: ids_copy.copy_(ids_TK), lambda: rows_copy.copy_(rows_NH)
    histogram = lambda: ops.expert_histogram(ids_TK, experts)  # noqa: E731
    none = ids_TK[:0]
    yield "call", lambda: ops.expert_histogram(none, experts), None, copy_ids
    yield "histogram", histogram, lambda: torch.bincount(ids_TK.flatten(), minlength=experts), copy_ids
    yield "histogram + plan", plan, plain_histogram_and_plan, copy_ids
    yield (
        "permute_out",
        lambda: ops.permute_out(x_TH, row_ids, positions_TK, rows_NH),
        lambda: torch.index_select(x_TH, 0, tokens_of_rows, out=rows_NH),
        copy_rows,
    )
    yield (
        "permute",
        lambda: ops.permute(x_TH, row_ids, positions_TK),
        lambda: x_TH.index_select(0, tokens_of_rows),
        copy_rows,
    )
    yield (
        "unpermute_out",
        lambda: ops.unpermute_out(rows_NH, positions_TK, weights_TK, out_TH),
        plain_unpermute,
        copy_rows,
    )
    grads = rows_NH.clone(), weights_TK.clone()
    yield (
        "unpermute_backward_out",
        lambda: raw.unpermute_backward_out(x_TH, rows_NH, positions_TK, weights_TK, *grads),
        None,
        copy_rows,
    )


def settings(arguments):
    """Yields (threads, tokens, hidden, dtype, top_k, experts), without rows of more memory than asked for."""
    threads = arguments.threads[:1] if arguments.device == "cuda" else arguments.threads
    lists = (threads, arguments.tokens, arguments.hidden, arguments.dtypes, arguments.top_k, arguments.experts)
    for setting in itertools.product(*lists):
        _, tokens, hidden, dtype, top_k, _ = setting
        if tokens * hidden * top_k * getattr(torch, dtype).itemsize <= arguments.max_gib * 2**30:
            yield setting


def run(arguments):
    """Yields one record per op and setting."""
    names = ("threads", "tokens", "hidden", "dtype", "top_k", "experts")
    for setting in settings(arguments):
        threads, tokens, hidden, dtype, top_k, experts = setting
        torch.set_num_threads(threads)
        for name, ours, plain, copy in benches(tokens, hidden, experts, top_k, getattr(torch, dtype), arguments.device):
            candidates = {"ours": ours, "torch": plain, "copy": copy}
            candidates = {name: f for name, f in candidates.items() if f is not None}
            times = measure(candidates, arguments.seconds, arguments.device)
            yield {**dict(zip(names, setting, strict=True)), "op": name, **times}


def main():
    """Prints a table; writes JSON where asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--hidden", type=int, nargs="+", default=[1024])
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64, 256])
    parser.add_argument("--top-k", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seconds", type=float, default=0.5, help="per op and setting")
    parser.add_argument("--max-gib", type=float, default=1.0, help="leave out rows of more memory")
    parser.add_argument("--json", help="where to write the figures")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not (torch.cuda.is_available() and ops.has_cuda_kernels()):
        print("skipped: no CUDA device, or no kernels in this build")
        return
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.machine()
    print(f"torch {torch.__version__}, {where}")
    columns = f"{'threads':>8}{'T':>7}{'H':>6}{'dtype':>10}{'k':>3}{'E':>5}"
    print(f"{'op':<24}{columns}{'us':>10}{'x torch':>9}{'x copy':>8}")
    records = []
    for record in run(arguments):
        records.append(record)
        ours, plain = record["ours"], record.get("torch")
        against_torch = f"{ours / plain:9.2f}" if plain else f"{'-':>9}"
        setting = f"{record['threads']:>8}{record['tokens']:>7}{record['hidden']:>6}{record['dtype']:>10}"
        setting += f"{record['top_k']:>3}{record['experts']:>5}"
        print(f"{record['op']:<24}{setting}{ours:10.1f}{against_torch}{ours / record['copy']:8.2f}", flush=True)
    if arguments.json:
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"arguments": vars(arguments), "versions": versions, "microseconds": records}, file, indent=1)


if __name__ == "__main__":
    main()
