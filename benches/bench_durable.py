"""Seconds until tensors are on disk: evermoe's writer, plain writes, safetensors, torch's checkpoints and fio.

    python benches/bench_durable.py [--mib 1024] [--rounds 7] [--folder FOLDER] [--json PATH]

All candidates run in turns. Each writes new files of the same size to the same folder, and ends once the data are on
disk. `plain` is one write and one fsync of bytes that are ready; `evermoe` also computes digests. `fio` writes the same
number of bytes past the page cache with four jobs, without reading them from a program's memory (`apt install fio`).
DeepSpeed's FastFileWriter is included if it is installed (`apt install libaio-dev`, `pip install deepspeed ninja`).
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from common import Table
from evermoe.checkpoint.plain_files import flush, write_units
from evermoe.state.unit import TensorSpec, Unit

TENSORS_IN_UNIT = 3
"""Bytes of state per float32 parameter with AdamW."""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=1024, help="size of each file (%(default)s)")
    parser.add_argument("--units", type=int, default=32, help="number of units, all of the same size (%(default)s)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", default=".", help="folder on the disk to measure (%(default)s)")
    parser.add_argument("--json", help="file for the results")
    arguments = parser.parse_args()
    units = make_units(arguments.mib << 20, arguments.units)
    nbytes = sum(len(data) for _, data in units.values())
    store = dist.FileStore(tempfile.mktemp(), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    writers = {
        "plain": plain,
        "evermoe": evermoe,
        "safetensors": safetensors,
        "DCP async_save": by_dcp,
    }
    if find_spec("deepspeed") is not None:
        writers["DeepSpeed"] = open_deepspeed()
    if shutil.which("fio"):
        writers["fio"] = fio
    seconds = {name: [] for name in writers}
    for turn in range(arguments.rounds + 1):
        for name, writer in writers.items():
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                os.sync()
                start = time.perf_counter()
                own = writer(Path(folder), units)
                taken = time.perf_counter() - start if own is None else own
            if turn:  # the first turn warms up
                seconds[name].append(taken)
    dist.destroy_process_group()
    report(seconds, nbytes, arguments)


def report(seconds, nbytes, arguments):
    columns = {
        "writer": "<16s",
        "s": "7.2f",
        "GB/s": "6.2f",
        "x plain": "9.2f",
        "from": "6.2f",
        "to": "6.2f",
        "of fio": "7.2f",
    }
    table = Table(
        f"{nbytes >> 20} MiB in {arguments.units} units: median seconds; medians of the ratios of paired turns", columns
    )
    for name, taken in seconds.items():
        ratios = sorted(a / b for a, b in zip(taken, seconds["plain"], strict=True))
        rate = [b / a for a, b in zip(taken, seconds.get("fio", []), strict=False)]
        middle = statistics.median(taken)
        table.add(
            writer=name,
            **{"s": middle, "GB/s": nbytes / middle / 1e9, "x plain": statistics.median(ratios)},
            **{"from": ratios[len(ratios) // 4], "to": ratios[-1 - len(ratios) // 4]},
            **{"of fio": statistics.median(rate) if rate else None},
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"rows": table.rows, "seconds": seconds}, indent=2) + "\n")


def make_units(nbytes, number):
    """Return units by name with their bytes, as a session reads them."""
    elements = nbytes // number // TENSORS_IN_UNIT // 4
    specs = tuple(TensorSpec(name, (elements,), torch.float32) for name in ("weights", "exp_avg", "exp_avg_sq"))
    data = torch.randint(0, 256, (number, TENSORS_IN_UNIT * elements * 4), dtype=torch.uint8)
    return {f"moe.experts.{at}": (Unit(f"moe.experts.{at}", specs, "moe", at), data[at]) for at in range(number)}


def tensors_of(units):
    return {f"{name}/{key}": each for name, (unit, data) in units.items() for key, each in unit.tensors(data).items()}


def plain(folder, units):
    with (folder / "file").open("wb", buffering=0) as file:
        for _, data in units.values():
            file.write(data.numpy())
        os.fsync(file.fileno())
    flush(folder)


def evermoe(folder, units):
    write_units(folder / "file.safetensors", units)
    flush(folder)


def safetensors(folder, units):
    save_file(tensors_of(units), folder / "file.safetensors")
    flush(folder / "file.safetensors")
    flush(folder)


def by_dcp(folder, units):
    """Write with torch's checkpoints, which flush their files."""
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    dcp.async_save(tensors_of(units), storage_writer=writer).result()


def open_deepspeed():
    """Compile DeepSpeed's kernels. Return its writer: past the page cache by libaio, four threads, two buffers."""
    from deepspeed.io import FastFileWriter, FastFileWriterConfig, fast_file_writer
    from deepspeed.io import utils as io_utils
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.utils import UtilsBuilder

    for module in (fast_file_writer, io_utils):
        module.UtilsBuilder = UtilsBuilder  # without a GPU it finds no builder, although the writer needs none
    handle = AsyncIOBuilder().load().aio_handle(8 << 20, 32, False, False, 4)
    buffer = handle.new_cpu_locked_tensor(256 << 20, torch.empty(0, dtype=torch.uint8))

    def by_deepspeed(folder, units):
        writer = FastFileWriter(str(folder / "file"), FastFileWriterConfig(handle, buffer))
        torch.save(tensors_of(units), writer, _use_new_zipfile_serialization=False)
        writer.close()
        flush(folder / "file")
        flush(folder)

    return by_deepspeed


def fio(folder, units):
    """Return the seconds that fio reports for its writes."""
    nbytes = sum(len(data) for _, data in units.values()) // 4 >> 22 << 22
    options = ["--name=write", "--rw=write", "--bs=4m", "--direct=1", "--ioengine=psync", "--numjobs=4", "--thread"]
    options += [
        f"--size={nbytes}",
        f"--directory={folder}",
        "--end_fsync=1",
        "--group_reporting",
        "--output-format=json",
    ]
    done = subprocess.run(["fio", *options], check=True, capture_output=True, text=True)
    written = json.loads(done.stdout)["jobs"][0]["write"]
    return sum(len(data) for _, data in units.values()) / written["bw_bytes"]


if __name__ == "__main__":
    main()
