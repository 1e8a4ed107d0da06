"""Do the checks of the kernels' tests find anything? Faults are planted in copies of the kernels' source."""

import contextlib
import fcntl
import functools
import hashlib
import itertools
import shutil
import struct
from dataclasses import dataclass

import pytest
import torch

from evermoe.ops.fp8 import dequantize_rows, quantize_rows
from support.kernels import ORDERS, ROOT, Buffer, Kernels, build, sparse
from support.tokens import draw_rows, fp8_row_bytes

TOKENS, TOP_K, EXPERTS, RANKS, WIDTH = 33, 2, 5, 2, 40
SLOTS = TOKENS * TOP_K
IDS = torch.arange(SLOTS) * 7 % EXPERTS


# ---- correct launches: those that a fault is to spoil ---------------------------------------------------
def histogram(kernels):
    counts = Buffer([EXPERTS], torch.int64, 0)
    table = struct.pack("<QQII", IDS.data_ptr(), SLOTS, 2, 1).ljust(64 * 24, b"\0")
    kernels("expert_histograms", 2, 64, 4 * EXPERTS, counts, 1, EXPERTS, table, also=[IDS])
    counts.equals(torch.bincount(IDS, minlength=EXPERTS))


def plan_count(kernels):
    buffers = [Buffer(shape, torch.int32) for shape in ([1, EXPERTS], [EXPERTS, RANKS + 1], [RANKS, EXPERTS + 1])]
    row_ids, send_counts = Buffer([SLOTS], torch.int64), torch.arange(EXPERTS * RANKS).view(EXPERTS, RANKS)
    sizes = (1, SLOTS, 1, SLOTS, EXPERTS, RANKS)
    kernels("plan_count_i64", 5, 64, 4 * EXPERTS, IDS, send_counts, *buffers, row_ids, *sizes)
    buffers[0].equals(torch.bincount(IDS, minlength=EXPERTS).int().view(1, -1))
    buffers[1].equals(torch.nn.functional.pad(send_counts.cumsum(1), (1, 0)).int())


def plan_tiles(kernels):
    counts, lines = Buffer([3, EXPERTS], torch.int32), [Buffer([EXPERTS, 1], torch.int32) for _ in range(2)]
    row_ids, none = Buffer([SLOTS], torch.int64), torch.zeros(1, dtype=torch.int64)
    kernels("plan_count_i64", 3, 64, 4 * EXPERTS, IDS, none, counts, *lines, row_ids, 1, 22, 3, SLOTS, EXPERTS, 0)
    tiles = IDS.view(3, 22)
    counts.equals(torch.stack([torch.bincount(tile, minlength=EXPERTS) for tile in tiles]).int())


def place(kernels):
    counts = torch.bincount(IDS, minlength=EXPERTS)
    begins = torch.stack([counts * 0, counts], 1).int()
    first_rows = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    row_ids, positions = Buffer([SLOTS], torch.int64, 0xFF), Buffer([SLOTS], torch.int64)
    arguments = (IDS, counts.int(), begins, first_rows, row_ids, positions, 1, SLOTS, 2, SLOTS, EXPERTS, 1)
    kernels("plan_place_i64", 1, 64, 4 * (2 * EXPERTS + 2), *arguments)
    row_ids.equals(IDS.argsort(stable=True))


def starts(kernels):
    counts = torch.arange(EXPERTS * RANKS)
    ours = [Buffer([EXPERTS * RANKS + 1], torch.int64) for _ in range(2)]
    kernels("regroup_starts", 1, 64, 64 * 8, counts, *ours, RANKS, EXPERTS)
    ours[0].equals(torch.nn.functional.pad(counts.cumsum(0), (1, 0)))


def split(kernels):
    tokens, replicas = torch.tensor([[5, 0, 1, 0]]), torch.ones(4, 1, dtype=torch.int64)
    send, receive = Buffer([1, 4], torch.int64), Buffer([4, 1], torch.int64)
    kernels("split_tokens", 1, 64, 20 * 16 + 4 * 36, tokens, replicas, send, receive, 20, 1, 4, 0)
    send.equals(torch.tensor([[2, 2, 0, 1]]))


def invert(kernels):
    positions, row_ids = torch.arange(SLOTS), Buffer([SLOTS - 1], torch.int64, 0xFF)
    kernels("invert_positions", 2, 32, 0, positions, row_ids, 1, SLOTS, SLOTS - 1)
    row_ids.equals(torch.arange(SLOTS - 1))


def permute(kernels):
    x, out = torch.randn(TOKENS, WIDTH).half(), Buffer([1, WIDTH], torch.float16)
    positions = torch.full([TOKENS, TOP_K], -1)  # the row is no token's to write
    kernels("permute", 1, 32, 0, x, torch.tensor([4]), positions, out, 1, 1, 1, 2 * WIDTH, TOKENS, TOP_K)
    out.equals(x[4 // TOP_K : 4 // TOP_K + 1])


def permute_far(kernels):
    tokens, width = (1 << 21) + 2, 1024
    x, out = sparse([tokens, width], torch.int16), Buffer([1, width], torch.int16)
    x[-1] = 7
    positions = sparse([tokens], torch.int32)
    positions[:] = -1
    positions[-1] = 0
    arguments, sizes = (x, torch.tensor([tokens - 1]), positions, out), (1, 0, 1, 2 * width, tokens, 1)
    kernels("permute", tokens, 32, 0, *arguments, *sizes, first_block=tokens - 1)
    out.equals(x[-1:])


def combine(kernels):
    rows, positions = torch.randn(SLOTS, WIDTH), torch.arange(SLOTS).view(TOKENS, TOP_K)
    out = Buffer([TOKENS, WIDTH], torch.float32)
    kernels("unpermute_f32_f32", 4, 32, 0, rows, positions, 0, out, 1, TOKENS, TOP_K, SLOTS, WIDTH)
    out.equals(rows.view(TOKENS, TOP_K, WIDTH).sum(1))


def backward(kernels):
    grad, rows, weights = torch.ones(TOKENS, WIDTH), torch.ones(SLOTS, WIDTH), torch.ones(SLOTS)
    grad_rows, grad_weights = Buffer([SLOTS, WIDTH], torch.float32), Buffer([SLOTS], torch.float32)
    order = torch.arange(SLOTS)
    arguments = (grad, rows, order, order, weights, grad_rows, grad_weights, SLOTS, WIDTH, SLOTS, TOP_K)
    kernels("unpermute_backward_f32_f32_i64", 2, 64, 0, *arguments)
    grad_weights.equals(torch.full([SLOTS], float(WIDTH)))


def backward_far(kernels):
    tokens, width = (1 << 22) + 2, 1024
    grad, rows, grad_rows = (
        sparse([tokens, width], torch.float32),
        torch.ones(1, width),
        Buffer([1, width], torch.float32),
    )
    grad[-1] = 3
    weights, grad_weights = sparse([tokens], torch.float32), sparse([tokens], torch.float32)
    weights[-1] = 1
    positions = torch.full([tokens], -1)
    positions[-1] = 0
    arguments = (
        grad,
        rows,
        positions,
        torch.tensor([tokens - 1]),
        weights,
        grad_rows,
        grad_weights,
        1,
        width,
        tokens,
        1,
    )
    kernels("unpermute_backward_f32_f32_i64", tokens, 32, 0, *arguments, first_block=tokens - 1)
    grad_rows.equals(grad[-1:])


def in_8_bits(kernels):
    x = draw_rows(3, 200, torch.bfloat16)
    packed = Buffer([3, fp8_row_bytes(200)], torch.uint8)
    kernels("quantize_bf16", 2, 64, 0, x, packed, 3, 200, fp8_row_bytes(200))
    packed.equals(quantize_rows(x))
    back = Buffer([3, 200], torch.bfloat16)
    kernels("dequantize_bf16", 2, 64, 0, packed, back, 3, 200, fp8_row_bytes(200))
    back.equals(dequantize_rows(packed.tensor, 200, torch.bfloat16))


def adamw(kernels):
    """Of two tensors."""
    step = struct.pack("<9fI", 1, 1, 1, 1, 0, 1, 0, 1, 1, 0)  # no gradient: m becomes 0, p and v stay
    states, entries = [[Buffer([size], torch.float32, 0) for _ in range(3)] for size in (WIDTH + 3, 8)], b""
    for state, end_block in zip(states, (2, 3), strict=True):
        addresses = [buffer.tensor.data_ptr() for buffer in state]
        entries += struct.pack("<5QI4B", *addresses, 0, len(state[0].tensor), end_block, 0, 1, 0, 1)
    entries += struct.pack("<5QI4B", *[0] * 5, 0xFFFFFFFF, *[0] * 4) * 62
    for _, m, _ in states:
        m.set(torch.ones_like(m.tensor))
    used = [buffer.tensor for state in states for buffer in state]
    kernels("adamw", 3, 32, 0, step.ljust(8 * 40, b"\0") + entries + bytes(64 * 9), also=used)
    for buffer in itertools.chain(*states):
        buffer.equals(torch.zeros_like(buffer.tensor))


# ---- faults ------------------------------------------------------------------------------------------------
@dataclass
class Fault:
    """The exact text `old` of the kernels' file becomes `new`; `launch` must then fail with `message`."""

    name: str
    file: str
    old: str
    new: str
    launch: object
    message: str
    build: int = 0  # faults of one build are in different functions
    unnoticed: tuple = ()  # orders in which nothing is wrong


FAULTS = [
    Fault(
        "the scales' padding is not cleared",
        "fp8.cu",
        "if (block == blocks - 1 && blocks + lane < scales)",
        "if (block == blocks && blocks + lane < scales)",
        in_8_bits,
        "Tensor-likes are not equal|uninitialised",
    ),
    Fault(
        "the largest magnitude of half the columns",
        "fp8.cu",
        "unsigned other = kLanes / 2; other > 0",
        "unsigned other = kLanes / 4; other > 0",
        in_8_bits,
        "Tensor-likes are not equal|race: ",
        1,
    ),
    Fault(
        "another scale's columns",
        "fp8.cu",
        "scales[column / kFp8Columns]",
        "scales[unit / kFp8Columns]",
        in_8_bits,
        "Tensor-likes are not equal|out of bounds|uninitialised",
        2,
    ),
    Fault(
        "no __syncthreads after clearing",
        "histogram.cu",
        "layer.end_block - first_block;\n  __syncthreads();",
        "layer.end_block - first_block;\n",
        histogram,
        r"histogram.cu:\d+: (race: changes atomically|uninitialised)",
    ),
    Fault(
        "__syncthreads in a divergent branch",
        "histogram.cu",
        "  __syncthreads();\n  for (size_t e = threadIdx.x; e < num_experts; e += blockDim.x) {",
        "  if (threadIdx.x < 32) __syncthreads();\n  for (size_t e = threadIdx.x; e < num_experts; e += blockDim.x) {",
        histogram,
        "not all of them reach a barrier; .*__syncthreads|race: ",
        1,
    ),
    Fault(
        "relies on block 0 running first",
        "histogram.cu",
        "if (count) atomicAdd(&counts_LE[l",
        "if (blockIdx.x == 0) atomicExch(&counts_LE[l * num_experts + e], 0ull + count);\n"
        "    else if (count) atomicAdd(&counts_LE[l",
        histogram,
        "not equal",
        2,
        unnoticed=(0,),
    ),
    Fault(
        "reads what another block counts",
        "plan.cu",
        "tile_counts[blockIdx.x * num_experts + e] = counts_E[e];",
        "tile_counts[blockIdx.x * num_experts + e] = counts_E[e] + (blockIdx.x ? tile_counts[e] : 0);",
        plan_tiles,
        r"plan.cu:\d+: (race: reads byte \d+ of argument 2.* of block 0 writes|uninitialised: reads)",
        3,
    ),
    Fault(
        "+= instead of atomicAdd",
        "plan.cu",
        "      if (experts[i] != kNoExpert) atomicAdd(&counts_E[experts[i]], 1u);\n  }\n  __syncthreads();",
        "      if (experts[i] != kNoExpert) counts_E[experts[i]] += 1;\n  }\n  __syncthreads();",
        plan_count,
        r"plan.cu:\d+: race: reads byte \d+ of dynamic shared memory.* writes at plan.cu:\d+",
    ),
    Fault(
        "no barrier between two steps of the scan",
        "exchange.cu",
        "    __syncthreads();\n    sums[threadIdx.x] += left;",
        "    sums[threadIdx.x] += left;",
        starts,
        r"exchange.cu:\d+: race: ",
    ),
    Fault(
        "no __syncwarp between reading and advancing the occurrences",
        "plan.cu",
        "      __syncwarp();\n      if (routed && before == 0)",
        "      if (routed && before == 0)",
        place,
        r"plan.cu:\d+: race: .*dynamic shared memory",
    ),
    Fault(
        "the warps' counts summed up while others count",
        "plan.cu",
        "  __syncthreads();\n  for (size_t e = threadIdx.x; e < num_experts; e += blockDim.x) {\n    for (size_t w = 1",
        "  for (size_t e = threadIdx.x; e < num_experts; e += blockDim.x) {\n    for (size_t w = 1",
        place,
        r"plan.cu:\d+: race: .*dynamic shared memory",
        2,
    ),
    Fault(
        "odd tokens given while other sources are divided",
        "exchange.cu",
        "      }\n    }\n    __syncthreads();\n    for (size_t row = 0; threadIdx.x < threads",
        "      }\n    }\n    for (size_t row = 0; threadIdx.x < threads",
        split,
        r"exchange.cu:\d+: (race: |uninitialised: reads )",
    ),
    Fault(
        "claims compared while they are made",
        "exchange.cu",
        "  if (threads == kWarp) __syncwarp(); else __syncthreads();\n",
        "",
        split,
        r"exchange.cu:\d+: race: ",
        1,
    ),
    Fault(
        "past the end of the buffer",
        "rows.cu",
        "if (row < num_rows) set_index(row_ids, row,",
        "if (row <= num_rows) set_index(row_ids, row,",
        invert,
        rf"common.cuh:\d+: out of bounds: writes 8 bytes.* argument 1 \(int64 \[{SLOTS - 1}\]\)"
        rf" of {8 * (SLOTS - 1)} bytes, at byte {8 * (SLOTS - 1)} of it",
    ),
    Fault(
        "past the end of a row",
        "rows.cu",
        "for (size_t u = lane; u < units; u += kWarp)",
        "for (size_t u = lane; u <= units; u += kWarp)",
        permute,
        r"rows.cu:\d+: out of bounds: writes 16 bytes",
    ),
    Fault(
        "32-bit index, signed",
        "rows.cu",
        "x[t * units + u]",
        "x[static_cast<int>(t) * static_cast<int>(units * sizeof(Unit)) / sizeof(Unit) + u]",
        permute_far,
        r"rows.cu:\d+: undefined: a signed product overflows|Tensor-likes are not equal",
        1,
    ),
    Fault(
        "32-bit index, unsigned",
        "rows.cu",
        "grad + quotient_of(s, top_k) * width",
        "grad + static_cast<uint32_t>(quotient_of(s, top_k)) * static_cast<uint32_t>(width)",
        backward_far,
        "Tensor-likes are not equal",
        1,
    ),
    Fault(
        "last counter never cleared",
        "plan.cu",
        "for (size_t e = threadIdx.x; e < num_experts; e += blockDim.x) counts_E[e] = 0",
        "for (size_t e = threadIdx.x; e + 1 < num_experts; e += blockDim.x) counts_E[e] = 0",
        plan_count,
        r"plan.cu:\d+: uninitialised: (changes atomically|reads) byte 16 of dynamic shared memory",
        1,
    ),
    Fault(
        "two blocks write one row",
        "rows.cu",
        "for (size_t t = group.index * tokens; t < num_tokens; t += group.count * tokens)",
        "for (size_t t = group.index / 2 * tokens; t < num_tokens; t += group.count / 2 * tokens)",
        combine,
        r"rows.cu:\d+: race: writes byte \d+ of argument 3 .*of block \d writes",
    ),
    Fault(
        "16 bytes, misaligned",
        "rows.cu",
        "reinterpret_cast<const Loaded<Row, kCount>*>(from + row)",
        "reinterpret_cast<const Loaded<Row, kCount>*>(from + row + 1)",
        combine,
        r"rows.cu:\d+: misaligned: .*16 bytes",
        1,
    ),
    Fault(
        "a lane leaves out the shuffles",
        "rows.cu",
        "for (unsigned half = kWarp / 2; half > 0; half /= 2) dot",
        "for (unsigned half = threadIdx.x % kWarp == 3 ? 0 : kWarp / 2; half > 0; half /= 2) dot",
        backward,
        "not all of them reach a barrier; .*__shfl_down_sync|does not take part",
    ),
    Fault(
        "memory never written",
        "plan.cu",
        "i < num_tables * num_experts; i += blockDim.x) tables[i] = 0",
        "i < num_tables * num_experts; i += blockDim.x) if (i) tables[i] = 0",
        place,
        r"plan.cu:\d+: uninitialised: (changes atomically|reads) byte 0 of dynamic shared memory",
        1,
    ),
    Fault(
        "a result read before it is written",
        "plan.cu",
        "starts[first + i] = ",
        "starts[first + i] += ",
        plan_count,
        r"plan.cu:\d+: uninitialised: reads byte \d+ of argument [34]",
        2,
    ),
    Fault(
        "one element too many at the tail",
        "replay.cu",
        "i < num_elements; i += threads)",
        "i <= num_elements; i += threads)",
        adamw,
        r"replay.cu:\d+: out of bounds: reads 4 bytes.* of (172|32) bytes, at byte (172|32) of it",
    ),
    Fault(
        "a block takes the tensor before its own",
        "replay.cu",
        ".end_block <= blockIdx.x) t += half",
        ".end_block < blockIdx.x) t += half",
        adamw,
        "Tensor-likes are not equal",
        1,
    ),
    Fault(
        "the blocks of other tensors counted as the tensor's",
        "replay.cu",
        "first_block = t > 0 ? tensors[t - 1].end_block : 0;",
        "first_block = 0;",
        adamw,
        "Tensor-likes are not equal",
        2,
    ),
    Fault(
        "two blocks take one part of a tensor",
        "replay.cu",
        "(blockIdx.x - first_block) * blockDim.x + threadIdx.x",
        "(blockIdx.x - first_block) / 2 * blockDim.x + threadIdx.x",
        adamw,
        r"replay.cu:\d+: race: (reads|writes) ",
        3,
    ),
]


@pytest.fixture(scope="session")
def planted(library):
    """`planted(fault)` is the path of kernels with the fault; the unchanged parts are those of the library."""

    @functools.cache
    def built(file, number):
        sources = planted_sources(file, number)
        content = hashlib.sha256(b"".join(sources.values()) + library.read_bytes()).hexdigest()
        place = ROOT / "target" / "emulator" / "planted" / content[:16]
        place.mkdir(parents=True, exist_ok=True)
        with open(place / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (place / "out" / "kernels.so").exists():
                (place / "out").mkdir(exist_ok=True)
                for part in [*library.parent.glob("emulator.*"), *library.parent.glob("checks.*")]:
                    shutil.copy2(part, place / "out")
                for name, text in sources.items():
                    (place / name).write_bytes(text)
                build(place / "out", checked=1, kernels=place)
        return place / "out" / "kernels.so"

    return lambda fault: built(fault.file, fault.build)


def planted_sources(file, number):
    """By name: the headers, and the one file with all faults of a build in it; of a header, the kernels that use it."""
    sources = {path.name: path.read_bytes() for path in (ROOT / "kernels").glob("*.*h")}
    if file.endswith(".cuh"):
        sources["rows.cu"] = (ROOT / "kernels/rows.cu").read_bytes()
    text = (ROOT / "kernels" / file).read_text()
    for fault in FAULTS:
        if (fault.file, fault.build) == (file, number):
            assert text.count(fault.old) == 1, f"{fault.name}: {fault.old!r} is no longer in {file} once"
            text = text.replace(fault.old, fault.new)
    return sources | {file: text.encode()}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("launch", dict.fromkeys(fault.launch for fault in FAULTS), ids=lambda launch: launch.__name__)
def test_unchanged_source_passes(library, launch, order):
    with contextlib.closing(Kernels(library, order)) as kernels:
        launch(kernels)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.few(2)
def test_fault_is_found(planted, fault, order):
    with contextlib.closing(Kernels(planted(fault), order)) as kernels:
        if order in fault.unnoticed:
            fault.launch(kernels)
            return
        with pytest.raises(AssertionError, match=fault.message) as caught:
            fault.launch(kernels)
        print(caught.value)


def test_launches_that_the_driver_would_refuse(library):
    kernels = Kernels(library)
    for launch, message in [
        ((0, 32, 0), "the grid is empty"),
        ((1, 2048, 0), "1 to 1024 threads"),
        ((1, 32, (48 << 10) + 1), "shared memory"),
    ]:
        with pytest.raises(AssertionError, match=message):
            kernels("invert_positions", *launch, torch.arange(1), torch.arange(1), 1, 1, 1)
    with pytest.raises(AssertionError, match=r"expected parameters of \[8, 8, 8, 8, 8\] bytes, got \[8, 8, 8\]"):
        kernels("invert_positions", 1, 32, 0, torch.arange(1), torch.arange(1), 1)
    with pytest.raises(AssertionError, match="no such kernel"):
        kernels("invert", 1, 32, 0)
