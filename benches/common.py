"""Shared by the benches: interleaved timing, ratios, tables and JSON output."""

import argparse
import json
import math
import platform
import statistics
import sys
import tempfile
import time

import torch
import torch.multiprocessing as mp

from evermoe.demo.flags import add_arguments as add_demo_arguments
from evermoe.demo.model import ByteGPT
from evermoe.ops.cache import has_cuda_kernels
from evermoe.simulate import Workload

FLUSHED_BYTES = 256 << 20
"""Bytes written between two calls, more than the L2 cache of any GPU: each call then reads its arrays from memory."""


def parser(doc, *, seconds, threads=(1, 2), devices=("cpu", "cuda")):
    """Return a parser with the options of every bench."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--device", choices=devices, default=devices[0])
    made.add_argument("--json", help="file for the results")
    made.add_argument("--threads", type=int, nargs="+", default=list(threads), help="numbers of CPU threads to measure")
    made.add_argument("--seconds", type=float, default=seconds, help="duration of each measurement (%(default)s)")
    return made


def parse(made):
    """Return the arguments. Exit with code 0 if they ask for a GPU and this machine has none."""
    arguments = made.parse_args()
    if arguments.device == "cuda":
        arguments.threads = arguments.threads[:1]
        if not (torch.cuda.is_available() and has_cuda_kernels()):
            print("skipped: no CUDA device, or no kernels in this build")
            sys.exit(0)
    return arguments


def where(device):
    """Return the name of the hardware."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"


def take_turns(candidates, seconds, device="cpu", clock=time.perf_counter_ns):
    """Time the functions in turns, so that a slow moment hits all. Return `{name: [microseconds of a call, ...]}`.

    On a GPU, CUDA events time the work itself, and the cache is flushed before each call. On the CPU, `clock` does.
    """

    def on_cpu(function):
        start = clock()
        function()
        return (clock() - start) / 1e3

    timed = _on_gpu if device == "cuda" else on_cpu
    for function in candidates.values():
        function()
    times = {name: [] for name in candidates}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or min(map(len, times.values())) < 5:
        for name, function in candidates.items():
            times[name].append(timed(function))
    return times


def _on_gpu(function):
    _flush()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


_flushed = []


def _flush():
    if not _flushed:
        _flushed.append(torch.empty(FLUSHED_BYTES, dtype=torch.uint8, device="cuda"))
    _flushed[0].zero_()


def medians(times):
    """Return the median of each candidate."""
    return {name: statistics.median(values) for name, values in times.items()}


def ratio(times, one, other):
    """Return the time of `one` divided by that of `other`: the median over the rounds, each of which ran both."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


def run_ranks(function, ranks, *arguments):
    """Call `function(rank, folder, *arguments)` in a process for each rank. Return what each returns: plain data."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_call, (function, folder, arguments), nprocs=ranks)
        return [torch.load(f"{folder}/returned-{rank}", weights_only=True) for rank in range(ranks)]


def _call(rank, function, folder, arguments):
    torch.set_num_threads(1)
    torch.save(function(rank, folder, *arguments), f"{folder}/returned-{rank}")


class Table:
    """Prints each row as it is added, and writes all rows as JSON at the end.

    Args:
        title: the first line.
        columns: names of the columns and their formats, such as `8.1f`. A missing value is printed as a dash.
        is_markdown: whether to print a table in Markdown.
    """

    def __init__(self, title, columns, *, is_markdown=False):
        self.title, self.columns, self.rows, self.is_markdown = title, columns, [], is_markdown
        print(title + "\n" * is_markdown)
        self._print(f"{name:>{self._width(name)}}" for name in columns)
        if is_markdown:
            self._print("---" for _ in columns)

    def _print(self, cells):
        if self.is_markdown:
            print(f"| {' | '.join(cell.strip() for cell in cells)} |", flush=True)
        else:
            print("".join(cells), flush=True)

    def _width(self, name):
        digits = self.columns[name].lstrip("<>").split(".")[0].rstrip("sdf")
        return max(int(digits or 0), len(name) + 2)

    def add(self, **row):
        """Add a row. Values without a column are only written as JSON."""
        self.rows.append(row)
        self._print(self._cell(name, row.get(name)) for name in self.columns)

    def _cell(self, name, value):
        width, kind = self._width(name), self.columns[name]
        if value is None:
            return f"{'-':>{width}}"
        return f"{value:>{width}{kind[kind.index('.') :] if '.' in kind else ''}}"

    def write(self, arguments):
        """Write the rows, the arguments and the versions to the file of `--json`, if it is given."""
        if not arguments.json:
            return
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        content = {
            "title": self.title,
            "machine": where(arguments.device),
            "arguments": {name: value for name, value in vars(arguments).items() if name != "json"},
            "versions": versions,
            "rows": self.rows,
        }
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1)


def demo_workload(flags, step_seconds, scaling):
    """Return the demo's model with these flags as a workload of the simulator."""
    flags_of_demo = argparse.ArgumentParser()
    add_demo_arguments(flags_of_demo)
    options = flags_of_demo.parse_args(flags)
    sizes = ("layers", "hidden", "heads", "intermediate", "experts", "top_k", "sequence")
    model = ByteGPT(**{name: getattr(options, name) for name in sizes})
    experts = sum(p.numel() for block in model.blocks for p in block.moe.parameters()) - sum(
        p.numel() for block in model.blocks for p in block.moe.router.parameters()
    )
    dense = sum(p.numel() for p in model.parameters()) - experts
    return Workload(
        name="demo",
        layers=options.layers,
        classes=options.layers,
        experts=options.experts,
        expert_parameters=experts // (options.layers * options.experts),
        dense_parameters=dense,
        step_seconds=step_seconds,
        tokens_per_step=options.batch * options.sequence,
        state_bytes=12,
        gradient_bytes=4,
        weight_bytes=4,
        scaling=scaling,
        expert_share=0.0,
    )


def scaling_of(steps, few, many):
    """Return `Workload.scaling` from the seconds of a step by number of workers, or 0 if one of the two is missing."""
    if few not in steps or many not in steps:
        return 0.0
    return min(max(math.log(steps[few] / steps[many]) / math.log(many / few), -1.0), 1.0)
