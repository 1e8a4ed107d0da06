"""Time and memory traffic of each kernel on this GPU, from its counters by Nsight Compute (`ncu`).

    python benches/bench_kernels.py [--json PATH]

Sizes are those of kernel_table.py: a layer of DeepSeek-V3. Each kernel runs once with flushed caches, at the current
clocks. `us` is its time. `read` and `written` are the bytes that went through the GPU's memory, and `of peak` is their
share of the memory's bandwidth. `warps` is the share of the warps that an SM can hold. The last two columns are of an
op, with all its kernels: `of copy` is the bytes it must move over its time, relative to a kernel that copies 1 GiB in
the same run. `moved / least` is its actual bytes over the bytes that it must move; the L2 cache can lower it.

Without ncu, CUDA events time replays of a CUDA graph of each op, so that gaps between launches do not count. `us` is
then the median time of an op with all its kernels, and the bytes that went through the memory are not known. Ops that
refuse to be captured, such as pack_chunks, are called instead.
"""

import argparse
import csv
import io
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from common import Table, medians, parse, parser, take_turns, where
from evermoe import ops
from evermoe.ops.chunks import BLOCK_BYTES, hash_blocks, pack_chunks, unpack_chunks
from evermoe.ops.fp8 import dequantize_rows, quantize_rows
from evermoe.ops.optim import adamw_, adamw_step, sgd_, sgd_step
from kernel_table import COPIED, OPS, PARAMETERS, E, H, K, R, T

METRICS = {
    "us": "gpu__time_duration.sum",
    "read": "dram__bytes_read.sum",
    "written": "dram__bytes_write.sum",
    "of peak": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
}
PLACES = [Path("/usr/local/cuda/bin/ncu"), *Path("/opt/nvidia/nsight-compute").glob("*/ncu")]


def calls():
    """Yield (name of an op in kernel_table, function) for this GPU. The first is the copy."""
    torch.manual_seed(0)

    def draw(*shape, dtype=torch.float32):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    a, b = draw(COPIED // 4), draw(COPIED // 4)
    yield "copy", lambda: torch.neg(a, out=b)
    ids_TK = torch.rand(T, E, device="cuda").topk(K).indices.int()
    counts_E = ops.expert_histogram(ids_TK, E)
    ranks = torch.arange(R, device="cuda")
    send_ER = counts_E[:, None] // R + (ranks < counts_E[:, None] % R)
    row_ids, positions_TK = ops.dispatch_plan(ids_TK, send_ER)
    yield "expert_histogram", lambda: ops.expert_histogram(ids_TK, E)
    yield "dispatch_plan", lambda: ops.dispatch_plan(ids_TK, send_ER)
    x_TH, weights_TK = draw(T, H, dtype=torch.bfloat16), draw(T, K).softmax(-1)
    rows_NH = ops.permute(x_TH, row_ids, positions_TK)
    yield "permute", lambda: ops.permute(x_TH, row_ids, positions_TK)
    yield "unpermute", lambda: ops.unpermute(rows_NH, positions_TK, weights_TK)
    backward = torch.ops.evermoe.unpermute_backward
    yield "unpermute_backward", lambda: backward(x_TH, rows_NH, positions_TK, weights_TK)
    counts_Re = torch.full((8, E // 8), T * K // E, device="cuda")
    yield "regroup", lambda: ops.regroup(rows_NH, counts_Re)
    yield "quantize_rows", lambda: quantize_rows(x_TH)
    packed = quantize_rows(rows_NH)
    yield "dequantize_rows", lambda: dequantize_rows(packed, H, torch.bfloat16)
    replicas_RE = torch.zeros(R, E, dtype=torch.int64, device="cuda")
    experts = torch.arange(E, device="cuda")
    replicas_RE[experts % R, experts] = 1
    replicas_RE[(7 * experts + 3) % R, experts] += 1
    counts_ER = (counts_E[:, None] // R).expand(E, R).contiguous()
    yield "split_tokens", lambda: ops.split_tokens(counts_ER, replicas_RE, 3)
    p, m, v, g = (draw(PARAMETERS) for _ in range(4))
    v.abs_()
    adamw = adamw_step(t=1, lr=1e-3)[None]
    yield "adamw_, adamw_all_ (a step)", lambda: adamw_(p, m, v, [g], adamw)
    sgd = sgd_step(is_first=False, lr=1e-3, momentum=0.9, weight_decay=1e-4)[None]
    yield "sgd_, sgd_all_ with momentum", lambda: sgd_(p, m, [g], sgd)
    chunks = torch.empty(COPIED >> 22, 4 << 20, dtype=torch.uint8, device="cuda")
    hashes = torch.empty(len(chunks), (4 << 20) // BLOCK_BYTES, dtype=torch.int64, device="cuda")
    wrong = torch.empty(len(chunks), dtype=torch.int64, device="cuda")
    yield "pack_chunks", lambda: pack_chunks([a], 0, chunks, hashes)
    yield "unpack_chunks", lambda: unpack_chunks(chunks, hashes, 0, [a], wrong)
    yield "hash_blocks", lambda: hash_blocks(chunks, hashes)


def launch():
    """Run each op twice, the second time with the counters on."""
    for _, function in calls():
        function()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        function()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()


def read(text):
    """Yield (op, kernel, metrics) from ncu's CSV: a line of names, one of units, then one for each launch."""
    ops_of = {launch.kernel: op.name for op in OPS for launch in op.launches}
    reader = csv.DictReader(io.StringIO(text[text.index('"ID"') :]))
    next(reader)
    op = "copy"
    for line in reader:
        kernel = line["Kernel Name"].split("(")[0].split("<")[0].removeprefix("void ")
        op = ops_of.get(kernel, op)  # kernels that torch launches for an op are part of the op
        values = {name: float(line[metric].replace(",", "")) for name, metric in METRICS.items()}
        yield op, kernel, values | {"us": values["us"] / 1e3}


def replay_of(function):
    """Return a function that replays the launches of an op, or the op itself if it refuses to be captured."""
    function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            function()
    except RuntimeError:
        return function
    return graph.replay


def times(seconds):
    """Yield (op, microseconds), the copy first."""
    for op, function in calls():
        yield op, medians(take_turns({op: replay_of(function)}, seconds, "cuda"))[op]


def show_times(arguments):
    """Print the table that needs no counters."""
    found, least = times(arguments.seconds), {op.name: op.least for op in OPS}
    copied = 2 * COPIED / next(found)[1]
    title = f"ops by events: torch {torch.__version__}, {where('cuda')}, copy {copied / 1e6:.2f} TB/s"
    table = Table(title, {"op": "<30s", "us": "9.1f", "of copy": ".2f"})
    for op, us in found:
        table.add(op=op, us=us, **{"of copy": least[op] / us / copied})
    table.write(arguments)


def main():
    made = parser(__doc__, seconds=0.2, threads=(1,), devices=("cuda",))
    made.set_defaults(device="cuda")
    made.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    arguments = parse(made)
    if arguments.launch:
        launch()
        return
    ncu = shutil.which("ncu") or next((str(place) for place in PLACES if place.exists()), None)
    if ncu is None:
        print("ncu of Nsight Compute is not on PATH or in /opt/nvidia: timing without counters")
        show_times(arguments)
        return
    options = ["--csv", "--page", "raw", "--print-units", "base", "--clock-control", "none"]
    options += ["--profile-from-start", "off", "--metrics", ",".join(METRICS.values())]
    command = [ncu, *options, sys.executable, __file__, "--launch"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if ran.returncode or '"ID"' not in ran.stdout:
        sys.exit(f"bench_kernels: ncu failed\n{ran.stdout[-3000:]}\n{ran.stderr[-3000:]}")
    found = list(read(ran.stdout))
    copied = next(2 * COPIED / values["us"] for op, _, values in found if op == "copy")
    least = {op.name: op.least for op in OPS}
    columns = {"op": "<30s", "kernel": "<36s", "us": "9.1f", "read MB": "9.1f", "written MB": "9.1f"}
    columns |= {"of peak": ".2f", "of copy": ".2f", "warps": ".2f", "moved / least": ".2f"}
    title = f"kernels by ncu: torch {torch.__version__}, {torch.cuda.get_device_name()}, copy {copied / 1e6:.2f} TB/s"
    table = Table(title, columns)
    for number, (op, kernel, values) in enumerate(found):
        of_op = [each for name, _, each in found if name == op]
        is_first = number == 0 or found[number - 1][0] != op
        row = {"op": op if is_first else "", "kernel": kernel, "us": values["us"]}
        row |= {"read MB": values["read"] / 1e6, "written MB": values["written"] / 1e6, "warps": values["warps"] / 100}
        row["of peak"] = values["of peak"] / 100
        if is_first and op in least:
            row["of copy"] = least[op] / sum(each["us"] for each in of_op) / copied
            row["moved / least"] = sum(each["read"] + each["written"] for each in of_op) / least[op]
        table.add(**row)
    table.write(arguments)


if __name__ == "__main__":
    main()
