"""Machine code that nvcc made of the kernels, read from this build: registers, spills, wide loads, rounding.

The machine code (SASS) shows registers and the width of accesses. How floats are rounded shows in the PTX, where
a correctly rounded division is one `div.rn.f32`, while its SASS holds reciprocals and flushes to zero of its own.
"""

import ctypes
import hashlib
import re
import subprocess
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from evermoe.ops.cache import has_cuda_kernels
from support.compiled import disassembled, fat_binaries, images, tool, usages
from support.kernels import ROOT

pytestmark = pytest.mark.long  # all machine code is read: a minute

ARCHS = ["sm_80", "sm_90", "sm_100"]
REGISTERS_OF_A_BLOCK, REGISTERS_AT_ONCE = 1 << 16, 8  # of the hardware, which allots them to threads in eights
WIDE = ("LDG.E.128", "STG.E.128")


@dataclass
class Expected:
    """Limits of a kernel: registers at most, instructions of which it has one, float operations other than + - *."""

    registers: int
    required: tuple = ()
    floats: tuple = ()  # of div.rn, sqrt.rn, fma.rn


DIV_SQRT_FMA = ("div.rn", "sqrt.rn", "fma.rn")
ROWS = ("LDG.E.128", "STG.E.128", "LDG.E.64", "STG.E.64", "LDG.E.U16", "STG.E.U16")
BACKWARD = (*WIDE, "SHFL.DOWN")
KERNELS = {
    "expert_histograms": Expected(24, ("ATOMS.POPC.INC", "LDG.E.64")),
    "plan_count_i32": Expected(56, ("ATOMS.POPC.INC",)),
    "plan_count_i64": Expected(56, ("ATOMS.POPC.INC", "LDG.E.64")),
    "plan_place_i32": Expected(64, ("MATCH.ANY", "ATOMS.POPC.INC", "STG.E.64")),
    "plan_place_i64": Expected(64, ("MATCH.ANY", "ATOMS.POPC.INC", "LDG.E.64", "STG.E.64")),
    "invert_positions": Expected(24, ("LDG.E.64", "STG.E.64")),
    "permute": Expected(64, ROWS),
    "unpermute_f32_f32": Expected(80, WIDE),
    "unpermute_bf16_f32": Expected(80, WIDE),
    "unpermute_bf16_bf16": Expected(80, WIDE),
    "unpermute_f16_f32": Expected(80, WIDE),
    "unpermute_f16_f16": Expected(80, WIDE),
    **{
        f"unpermute_backward_{types}_{index}": Expected(48, BACKWARD)
        for types in ("f32_f32", "bf16_f32", "bf16_bf16", "f16_f32", "f16_f16")
        for index in ("i32", "i64")
    },
    "quantize_f32": Expected(48, ("LDG.E.128", "SHFL.BFLY"), ("div.rn",)),
    "quantize_bf16": Expected(56, ("LDG.E.128", "STG.E.64", "SHFL.BFLY"), ("div.rn",)),
    "quantize_f16": Expected(56, ("LDG.E.128", "STG.E.64", "SHFL.BFLY"), ("div.rn",)),
    "dequantize_f32": Expected(32, ("STG.E.128",)),
    "dequantize_bf16": Expected(32, ("LDG.E.64", "STG.E.128")),
    "dequantize_f16": Expected(32, ("LDG.E.64", "STG.E.128")),
    "regroup_starts": Expected(48, ("LDG.E.64", "STG.E.64")),
    "regroup": Expected(64, ROWS),
    "split_tokens": Expected(80),
    "adamw": Expected(48, (*WIDE, "LDG.E.64"), DIV_SQRT_FMA),
    "sgd": Expected(48, (*WIDE, "LDG.E.64"), ("div.rn", "fma.rn")),
    # Tensors' addresses come from a table, so that accesses to them do not name the memory: LD and ST.
    "pack_chunks": Expected(128, ("LD.E.128", "STG.E.128")),
    "unpack_chunks": Expected(80, ("LDG.E.128", "ST.E.128")),
    "hash_blocks": Expected(80, ("LDG.E.128",)),
    "digest_units": Expected(120, ("LD.E.128",)),
}

MORE_ON_SM_100 = {
    "plan_count_i32": 64,
    "plan_count_i64": 64,
    "plan_place_i32": 112,
    "plan_place_i64": 112,
    **{
        f"unpermute_backward_{types}_{index}": 64
        for types in ("f32_f32", "bf16_f32", "bf16_bf16", "f16_f32", "f16_f16")
        for index in ("i32", "i64")
    },
    "quantize_f32": 64,
    "quantize_bf16": 80,
    "quantize_f16": 80,
    "regroup_starts": 48,
    "regroup": 56,
    "unpack_chunks": 96,
    "hash_blocks": 88,
}
"""Registers of the kernels for which nvcc takes more on that architecture."""


@dataclass
class Compiled:
    """A kernel for one architecture."""

    usage: dict = field(default_factory=dict)  # REG, STACK, LOCAL, ...
    instructions: list = field(default_factory=list)


@pytest.fixture(scope="module")
def texts():
    if not has_cuda_kernels():
        pytest.skip("this build has no CUDA kernels")
    if not (tool("cuobjdump") and tool("nvdisasm")):
        pytest.skip("needs nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm")
    content = hashlib.sha256(b"".join(fat_binaries())).hexdigest()
    return disassembled(ROOT / "target" / "disassembled" / content[:16])


@pytest.fixture(scope="module")
def compiled(texts):
    """(kernel, architecture) -> Compiled."""
    found, arch, kernel = defaultdict(Compiled), None, None
    for each, usage in usages(texts["-res-usage"]).items():
        found[each].usage = usage
    for line in texts["-sass"].splitlines():
        if match := re.search(r"code for (\w+)", line):
            arch = match[1]
        elif match := re.search(r"Function : (\w+)", line):
            kernel = match[1]
        elif match := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", line):
            found[kernel, arch].instructions.append(match[1])
    return found


def has(instructions, prefix):
    return any(f"{instruction}.".startswith(f"{prefix}.") for instruction in instructions)


def suggestion(versions):
    """A row for a kernel that the table does not know."""
    registers = max(-(-v.usage["REG"] // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE for v in versions)
    wide = tuple(name for name in WIDE if all(has(v.instructions, name) for v in versions))
    return f"Expected({registers}{f', {wide}' if wide else ''})"


def test_every_kernel_is_in_the_table(compiled, fast_library):
    names = {name for name, _ in compiled}
    lines = [
        f'    "{name}": {suggestion([v for (n, _), v in compiled.items() if n == name])},'
        for name in sorted(names - KERNELS.keys())
    ]
    assert not lines, "add to KERNELS, with the instructions that the kernel promises:\n" + "\n".join(lines)
    assert not KERNELS.keys() - names, "kernels that are no longer compiled: take them out of KERNELS"
    assert set(compiled) == {(name, arch) for name in names for arch in ARCHS}
    assert names == set(launch_bounds(fast_library)), "the library was built from other kernels: build it again"


@pytest.mark.parametrize("arch", ARCHS)
def test_registers_and_local_memory(compiled, arch):
    wrong = []
    for name, expected in KERNELS.items():
        kernel = compiled[name, arch]
        most = MORE_ON_SM_100.get(name, expected.registers) if arch == "sm_100" else expected.registers
        if kernel.usage["REG"] > most:
            wrong.append(f"{name}: {kernel.usage['REG']} registers, expected at most {most}")
        local = kernel.usage["STACK"] + kernel.usage["LOCAL"]
        if local or has(kernel.instructions, "LDL") or has(kernel.instructions, "STL"):
            wrong.append(f"{name}: {local} bytes of local memory, expected none")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("arch", ARCHS)
def test_required_instructions(compiled, arch):
    wrong = [
        f"{name}: no {instruction}"
        for name, expected in KERNELS.items()
        for instruction in expected.required
        if not has(compiled[name, arch].instructions, instruction)
    ]
    assert not wrong, "\n".join(wrong)


def test_images_are_of_the_kind_that_drivers_of_cuda_12_take(compiled, tmp_path):
    """The version of the ABI in the head of an ELF file: 7 of CUDA 12, but for sm_100; CUDA 13 makes 8 of all."""
    assert compiled
    found = images(tmp_path)
    assert len(found) == len(ARCHS) * len(list(fat_binaries()))
    assert {image[:4] for image in found.values()} == {b"\x7fELF"}
    assert {(name.split(".")[-2], image[8]) for name, image in found.items()} == {
        ("sm_80", 7),
        ("sm_90", 7),
        ("sm_100", 8),
    }


def launch_bounds(library):
    """Kernel -> threads of its largest block; build.mk found the kernels in the sources."""
    text = "".join(path.read_text() for path in library.parent.glob("*.kernels.cpp"))
    emulator = ctypes.CDLL(str(library))
    return {name: emulator.emulated_max_threads(name.encode()) for name in re.findall(r"EVERMOE_KERNEL\((\w+),", text)}


def test_the_largest_block_fits(compiled, fast_library):
    """The stand-in driver refuses blocks past the launch bounds; within them the registers must suffice."""
    bounds = launch_bounds(fast_library)
    wrong = []
    for (name, arch), kernel in compiled.items():
        registers = -(-kernel.usage["REG"] // REGISTERS_AT_ONCE) * REGISTERS_AT_ONCE
        if registers * bounds[name] > REGISTERS_OF_A_BLOCK:
            wrong.append(f"{name} on {arch}: {registers} registers for {bounds[name]} threads: give __launch_bounds__")
    assert not wrong, "\n".join(wrong)


FLOAT_OPERATION = re.compile(r"\b([a-z][a-z0-9_]*(?:\.[a-z0-9_]+)*)\.(?:f16x2|bf16x2|f16|bf16|f32|f64)\b")
NO_ARITHMETIC = {
    "mov",
    "ld",
    "st",
    "selp",
    "setp",
    "set",
    "neg",
    "abs",
    "min",
    "max",
    "cvt",
    "atom",
    "red",
    "shfl",
    "copysign",
}
ROUNDED = {"add.rn", "sub.rn", "mul.rn"}


def wrong_floats(ptx):
    """Return what of a kernel's PTX the CPU would not compute to the same bit, except what its row allows.

    Each sum and product must say that it is rounded by itself: nvcc writes `mul.f32` for a plain `*`, which ptxas may
    fuse with a sum, and `mul.rn.f32` for `__fmul_rn`. Approximations say `.approx` or `.full`, flushes `.ftz`.
    """
    wrong = []
    for entry in re.split(r"^\.visible \.entry ", ptx, flags=re.MULTILINE)[1:]:
        name = re.match(r"\w+", entry)[0]
        allowed = ROUNDED | set(KERNELS[name].floats if name in KERNELS else ())
        for operation in sorted({match[1] for match in FLOAT_OPERATION.finditer(entry)}):
            is_arithmetic = operation.split(".")[0] not in NO_ARITHMETIC
            if re.search(r"\.(ftz|approx|full)\b", operation) or (is_arithmetic and operation not in allowed):
                wrong.append(f"{name}: {operation}")
    return wrong


def test_floats_are_rounded_one_by_one(texts):
    assert ".visible .entry adamw(" in texts["-ptx"]
    wrong = wrong_floats(texts["-ptx"])
    assert not wrong, "not the CPU's bits, or not in the kernel's row:\n" + "\n".join(wrong)


SLOPPY = """
extern "C" __global__ void permute_16(float* a, const float* b) { a[0] = a[0] * b[0]; }
extern "C" __global__ void adamw(float* a, const float* b) {
  a[0] = __fdividef(a[0], b[0]);
  a[1] = __fmaf_rn(a[1], b[1], b[2]);
}
extern "C" __global__ void permute_2(float* a, const float* b) { a[0] = __fmul_rn(a[0], b[0]) + __expf(b[1]); }
extern "C" __global__ void unpermute_f32_f32_1(float* a, const float* b) { a[0] = __fmaf_rn(a[0], b[0], b[1]); }
"""


def test_sloppy_floats_are_found(tmp_path):
    nvcc = tool("nvcc")
    if not nvcc:
        pytest.skip("needs nvcc")
    (tmp_path / "sloppy.cu").write_text(SLOPPY)
    include = Path(nvcc).resolve().parent.parent / "include"
    command = [nvcc, "-ptx", "-arch=compute_90", "-I", include, "-o", tmp_path / "sloppy.ptx", tmp_path / "sloppy.cu"]
    subprocess.run(command, check=True, timeout=100)
    wrong = wrong_floats((tmp_path / "sloppy.ptx").read_text())
    assert {"permute_16: mul", "adamw: div.approx", "unpermute_f32_f32_1: fma.rn", "permute_2: add"} <= set(wrong)
    assert any(operation.startswith("permute_2: ex2.approx") for operation in wrong)
    assert not any(operation in wrong for operation in ["adamw: fma.rn", "permute_2: mul.rn"])


def test_parts_of_instructions():
    assert has(["LDG.E.128.CONSTANT"], "LDG.E.128")
    assert not has(["LDG.E.64", "LDG.E.1280"], "LDG.E.128")
