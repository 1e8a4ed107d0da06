"""The cost of each kernel, computed from the compiled code and the launches. No GPU is needed.

Registers and shared memory are read from the images of this build. The number of threads that an SM holds at once
follows from them by the rules of NVIDIA's occupancy calculator. "moved" is the bytes that an op's launches request from
memory. "least" is the bytes that the op must move: every input read once, every output written once. Savings by the L2
cache are not included. The script fails if a kernel of the build is missing here.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "python"))

from support.compiled import disassemble, tool, usages

T, K, H, E, R = 8192, 8, 7168, 256, 64
"""Tokens, experts per token, elements of a row (bfloat16), experts, ranks: a layer of DeepSeek-V3."""
S = T * K
"""Slots, and rows."""
ROW = 2 * H
"""Bytes of a row."""
FP8_ROW = H + 4 * H // 128
"""Bytes of an 8-bit row."""
PARAMETERS = 1 << 26
COPIED = 1 << 30
"""Bytes of copied state."""
TILES = S // 4096

SM = {"sm_80": 164 << 10, "sm_90": 228 << 10, "sm_100": 228 << 10}
"""Shared memory of an SM. All three have 65536 registers, 2048 threads, 32 blocks, and 1 KiB of system use a block."""


@dataclass
class Launch:
    """One launch: its kernel, threads per block and dynamic shared memory."""

    kernel: str
    threads: int
    shared: int = 0


@dataclass
class Op:
    """An op at the sizes above."""

    name: str
    launches: list
    memsets: int
    moved: int
    least: int


TYPES = ("f32_f32", "bf16_f32", "bf16_bf16", "f16_f32", "f16_f16")
OTHER_TYPES = {
    "plan_count_i64": "plan_count_i32",
    "plan_place_i64": "plan_place_i32",
    **{f"unpermute_{types}": "unpermute_bf16_f32" for types in TYPES},
    **{
        f"unpermute_backward_{types}_{index}": "unpermute_backward_bf16_f32_i32"
        for types in TYPES
        for index in ("i32", "i64")
    },
    **{f"{way}_{name}": f"{way}_bf16" for way in ("quantize", "dequantize") for name in ("f32", "bf16", "f16")},
}
"""Kernels for other types or alignments, and the kernel that is shown in their place."""

OPS = [
    Op("expert_histogram", [Launch("expert_histograms", 256, 4 * E)], 1, 8 * S + 8 * E, 8 * S + 8 * E),
    Op(
        "dispatch_plan",
        [
            Launch("plan_count_i32", 512, 4 * E),
            Launch("plan_place_i32", 512, 4 * (16 * E + R + 1)),
        ],
        0,
        # ids twice; results, one of them filled first; two numbers per segment and slot; tables of the tiles, written
        # and read by all later tiles; segments: counts read twice, both tables written
        2 * 4 * S + 3 * 4 * S + 2 * 4 * S + 4 * TILES * E * (1 + TILES // 2) + (2 * 8 + 2 * 4) * E * R,
        4 * S + 8 * E * R + 2 * 4 * S,
    ),
    Op("permute", [Launch("permute", 256)], 0, (T + S) * ROW + 4 * 4 * S, (T + S) * ROW + 4 * S),
    Op("unpermute", [Launch("unpermute_bf16_f32", 256)], 0, (S + T) * ROW + 8 * S, (S + T) * ROW + 8 * S),
    Op(
        "unpermute_backward",
        [Launch("invert_positions", 256), Launch("unpermute_backward_bf16_f32_i32", 256)],
        1,
        # the warps of a block read the gradient of one token at the same time; row ids filled, written and read twice
        (T + 2 * S) * ROW + 6 * 4 * S + 2 * 4 * S,
        (T + 2 * S) * ROW + 3 * 4 * S,
    ),
    Op(
        "regroup",
        [Launch("regroup_starts", 1024, 8 * 1024), Launch("regroup", 256)],
        0,
        2 * S * ROW + 5 * 8 * E,
        2 * S * ROW + 8 * E,
    ),
    Op("quantize_rows", [Launch("quantize_bf16", 256)], 0, T * (ROW + FP8_ROW), T * (ROW + FP8_ROW)),
    Op("dequantize_rows", [Launch("dequantize_bf16", 256)], 0, S * (ROW + FP8_ROW), S * (ROW + FP8_ROW)),
    Op("split_tokens", [Launch("split_tokens", 256, 48 << 10)], 0, 4 * 8 * E * R, 4 * 8 * E * R),
    Op("adamw_, adamw_all_ (a step)", [Launch("adamw", 256)], 0, 28 * PARAMETERS, 28 * PARAMETERS),
    Op("sgd_, sgd_all_ with momentum", [Launch("sgd", 256)], 0, 20 * PARAMETERS, 20 * PARAMETERS),
    Op("pack_chunks", [Launch("pack_chunks", 64)], 0, 2 * COPIED + COPIED // 512, 2 * COPIED + COPIED // 512),
    Op("unpack_chunks", [Launch("unpack_chunks", 64)], 1, 2 * COPIED + COPIED // 512, 2 * COPIED + COPIED // 512),
    Op("hash_blocks", [Launch("hash_blocks", 64)], 0, COPIED + COPIED // 512, COPIED + COPIED // 512),
]


def resident(registers, shared, threads, arch):
    """Return the number of threads that an SM holds at once.

    Registers are allocated to a warp in units of 256. So 48 registers per thread are 1536 per warp: 42 warps fit, which
    are 5 blocks of 8 warps.
    """
    warps = -(-threads // 32)
    of_a_warp = -(-registers * 32 // 256) * 256
    blocks = [(1 << 16) // of_a_warp // warps, 2048 // (32 * warps), 32, SM[arch] // (shared + 1024)]
    return min(blocks) * 32 * warps


def rows(found):
    """Return a line for each launch."""
    for op in OPS:
        for number, launch in enumerate(op.launches):
            line = {"op": op.name if number == 0 else "", "kernel": launch.kernel, "threads": launch.threads}
            for arch in SM:
                usage = found[launch.kernel, arch]
                shared = usage.get("SHARED", 0) + launch.shared
                held = resident(usage["REG"], shared, launch.threads, arch)
                line[arch] = {"registers": usage["REG"], "threads of an SM": held}
            if number == 0:
                line |= {"launches": len(op.launches) + op.memsets, "moved / least": round(op.moved / op.least, 2)}
            yield line


def main():
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--json", help="file for the results")
    arguments = made.parse_args()
    if tool("cuobjdump") is None:
        raise SystemExit("kernel_table: expected cuobjdump (pip install nvidia-cuda-cuobjdump, or the CUDA toolkit)")
    with tempfile.TemporaryDirectory() as folder:
        found = usages(disassemble(Path(folder), ["-res-usage"])["-res-usage"])
    shown = {launch.kernel for op in OPS for launch in op.launches}
    missing = {kernel for kernel, _ in found} ^ (shown | OTHER_TYPES.keys())
    if missing:
        raise SystemExit(
            f"kernel_table: the kernels of this build and of this list differ: {', '.join(sorted(missing))}"
        )
    lines = list(rows(found))
    print(f"T={T} K={K} H={H} (bfloat16) E={E} R={R}; registers → threads that an SM holds at once")
    print("| op | kernel | threads |", " | ".join(SM), "| launches | moved / least |")
    print("|---" * (5 + len(SM)) + "|")
    for line in lines:
        of_archs = [f"{line[arch]['registers']} → {line[arch]['threads of an SM']}" for arch in SM]
        ends = [str(line.get(name, "")) for name in ("launches", "moved / least")]
        print("|", " | ".join([line["op"], f"`{line['kernel']}`", str(line["threads"]), *of_archs, *ends]), "|")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(lines, indent=1))


if __name__ == "__main__":
    main()
