"""What the benches share: candidates that take turns, ratios, tables, JSON, and what a machine without a GPU says."""

import argparse
import json
import math
import platform
import statistics
import sys
import time

import torch

from evermoe.demo.flags import add_arguments as add_demo_arguments
from evermoe.demo.model import ByteGPT
from evermoe.ops.cache import has_cuda_kernels
from evermoe.simulate import Workload

FLUSHED_BYTES = 256 << 20
"""More than the second-level cache of any GPU: written between two calls, so that each finds its arrays in memory."""


def parser(doc, *, seconds, threads=(1, 2), devices=("cpu", "cuda")):
    """A parser with the options that every bench has."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--device", choices=devices, default="cpu")
    made.add_argument("--json", help="where to write the figures")
    made.add_argument("--threads", type=int, nargs="+", default=list(threads), help="on the CPU")
    made.add_argument("--seconds", type=float, default=seconds, help="per setting and thing to measure")
    return made


def parse(made):
    """The arguments; ends the program, with success, where they ask for a GPU that is not there."""
    arguments = made.parse_args()
    if arguments.device == "cuda":
        arguments.threads = arguments.threads[:1]
        if not (torch.cuda.is_available() and has_cuda_kernels()):
            print("skipped: no CUDA device, or no kernels in this build")
            sys.exit(0)
    return arguments


def where(device):
    """The hardware in words."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"


def take_turns(candidates, seconds, device="cpu", clock=time.perf_counter_ns):
    """Microseconds of each call of each function: `{name: [call, ...]}`. They take turns: a slow moment hits all.

    On a GPU, the time of the work itself, with arrays that the cache does not hold; else by the clock.
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
    """Median of each candidate."""
    return {name: statistics.median(values) for name, values in times.items()}


def ratio(times, one, other):
    """How many times as long `one` takes as `other`: the median over the rounds, in which both ran side by side."""
    return statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))


class Table:
    """Rows that are printed when they are known, and written as JSON in the end.

    Args:
        title: first line.
        columns: name of each column and its format, such as `8.1f`; a missing value is a dash.
    """

    def __init__(self, title, columns):
        self.title, self.columns, self.rows = title, columns, []
        print(title)
        print("".join(f"{name:>{self._width(name)}}" for name in columns), flush=True)

    def _width(self, name):
        digits = self.columns[name].lstrip("<>").split(".")[0].rstrip("sdf")
        return max(int(digits or 0), len(name) + 2)

    def add(self, **row):
        """Adds a row; names beyond the columns go to the JSON alone."""
        self.rows.append(row)
        print("".join(self._cell(name, row.get(name)) for name in self.columns), flush=True)

    def _cell(self, name, value):
        width, kind = self._width(name), self.columns[name]
        if value is None:
            return f"{'-':>{width}}"
        return f"{value:>{width}{kind[kind.index('.') :] if '.' in kind else ''}}"

    def write(self, arguments):
        """Writes the rows, the arguments and the versions, where the arguments say so."""
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
    """The demo's model with these flags, for a simulation."""
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
    """`Workload.scaling` from the seconds of a step by the number of workers; 0 where one was not measured."""
    if few not in steps or many not in steps:
        return 0.0
    return min(max(math.log(steps[few] / steps[many]) / math.log(many / few), -1.0), 1.0)
