"""Copies of tensors to chunks and back, compared with plain copies of the same bytes, in one run.

    python benches/bench_copies.py [--device cuda] [--json PATH] [--mib 256] [--tensors 64]
                                   [--chunk-kib 16 256 4096 65536]

On the CPU, `pack` and `unpack` copy, and hash each block of 4 KiB; `hash` only hashes. They are compared with one
memcpy of the same bytes ("copy"), with torch's own copies without a hash ("torch": `torch.cat`, `_foreach_copy_`), and
with a copy followed by a hash of everything ("copy, then hash").

On CUDA, `save` and `restore` are measured from launch to end, and compared with one large copy to page-locked memory.
The kernels alone are compared with a copy within the device. `host reads` is the speed at which the host reads the
page-locked memory, compared with ordinary memory. `digest` computes the digests of a recovery, each tensor a unit; it
is compared with the same large copy and with plain copies of each tensor ("torch"). 1 / "x copy" is their share of the
link. It includes the time to page-lock memory, so that it grows with `--mib`.

The candidates run in turns; each value is the median. `GB/s` counts the tensors' bytes once. A ratio below 1 means
faster than the copy.
"""

import torch

from common import Table, medians, parse, parser, ratio, take_turns, where
from evermoe.copies.snapshot import chunked_copy
from evermoe.ops import chunks
from evermoe.state.gpu_digests import gpu_digests


def tensors_of(mib, count, device):
    """Return float32 tensors of about `mib` MiB in total. The size of every third is not a multiple of 16 bytes."""
    size = (mib << 20) // count // 4
    return [torch.randn(size + (index % 3 == 2), device=device) for index in range(count)]


def cpu_benches(tensors, chunk_bytes):
    """Yield (op, candidates)."""
    shape = (chunks.num_chunks(tensors, chunk_bytes), chunk_bytes)
    packed = torch.zeros(shape, dtype=torch.uint8)
    hashes = torch.zeros(shape[0], chunk_bytes // chunks.BLOCK_BYTES, dtype=torch.int64)
    wrong = torch.zeros(shape[0], dtype=torch.int64)
    flat, flat_copy = torch.cat(tensors), torch.cat(tensors)
    views = list(flat.split([tensor.numel() for tensor in tensors]))
    other = packed.clone()

    def copy_then_hash():
        other.copy_(packed)
        chunks.hash_blocks(other, hashes)

    copy = lambda: flat_copy.copy_(flat)  # noqa: E731
    chunks.pack_chunks(tensors, 0, packed, hashes)
    pack = {"ours": lambda: chunks.pack_chunks(tensors, 0, packed, hashes), "copy": copy}
    pack["torch"] = lambda: torch.cat(tensors, out=flat)
    yield "pack", pack | {"copy, then hash": copy_then_hash}
    unpack = {"ours": lambda: chunks.unpack_chunks(packed, hashes, 0, tensors, wrong), "copy": copy}
    yield "unpack", unpack | {"torch": lambda: torch._foreach_copy_(tensors, views)}
    yield "hash", {"ours": lambda: chunks.hash_blocks(packed, hashes), "copy": copy}


def cuda_benches(tensors, chunk_bytes):
    """Yield (op, candidates)."""
    copier = chunked_copy.ChunkedCopy(tensors, chunk_bytes)
    flat = torch.cat(tensors)
    pinned = torch.empty(flat.shape, pin_memory=True)
    packed = torch.empty(copier.chunks.shape, dtype=torch.uint8, device="cuda")
    hashes, other = torch.empty(copier.hashes.shape, dtype=torch.int64, device="cuda"), torch.empty_like(flat)
    wrong = torch.empty(len(packed), dtype=torch.int64, device="cuda")
    plain = copier.chunks.clone()
    units = [[tensor] for tensor in tensors]

    def save():
        saved = copier.save()
        saved.release()
        saved.wait()

    def restore():
        """Restore as `ChunkedCopy.restore` does, without the check on the host."""
        copier._copier.restore(copier._stream(), 0, len(copier.chunks))
        copier._copier.wait(0, len(copier.chunks))

    to_host = lambda: pinned.copy_(flat, non_blocking=True)  # noqa: E731
    within = lambda: other.copy_(flat)  # noqa: E731
    yield "save", {"ours": save, "copy": to_host}
    digest = {"ours": lambda: gpu_digests(units), "copy": to_host}
    yield "digest", digest | {"torch": lambda: [tensor.cpu() for tensor in tensors]}
    yield "restore", {"ours": restore, "copy": lambda: flat.copy_(pinned, non_blocking=True)}
    yield "pack", {"ours": lambda: chunks.pack_chunks(tensors, 0, packed, hashes), "copy": within}
    yield "unpack", {"ours": lambda: chunks.unpack_chunks(packed, hashes, 0, tensors, wrong), "copy": within}
    yield "hash", {"ours": lambda: chunks.hash_blocks(packed, hashes), "copy": within}
    # The "copy" of this case reads the same bytes from memory that is not page-locked.
    yield (
        "host reads",
        {"ours": lambda: copier.chunks.view(torch.int64).sum(), "copy": lambda: plain.view(torch.int64).sum()},
    )


def main():
    """Print a table, and write JSON if `--json` is given."""
    made = parser(__doc__, seconds=1.0)
    made.add_argument("--mib", type=int, default=256, help="total size of the tensors")
    made.add_argument("--tensors", type=int, default=64)
    made.add_argument("--chunk-kib", type=int, nargs="+", default=[16, 256, 4096, 65536])
    arguments = parse(made)
    tensors = tensors_of(arguments.mib, arguments.tensors, arguments.device)
    num_bytes = sum(tensor.nbytes for tensor in tensors)
    title = f"copies: torch {torch.__version__}, {where(arguments.device)}, {len(tensors)} tensors, {arguments.mib} MiB"
    columns = {"op": "10s", "threads": "d", "chunk KiB": "d", "us": "11.1f", "GB/s": "8.1f", "x copy": "8.2f"}
    table = Table(title, columns | {"torch x copy": ".2f", "copy, then hash x copy": ".2f"})
    benches = cuda_benches if arguments.device == "cuda" else cpu_benches
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for kib in arguments.chunk_kib:
            for name, candidates in benches(tensors, kib << 10):
                times = take_turns(candidates, arguments.seconds, arguments.device)
                found = medians(times)
                ratios = {f"{other} x copy": ratio(times, other, "copy") for other in times if other != "copy"}
                row = {"op": name, "threads": threads, "chunk KiB": kib, "us": found["ours"]}
                row |= {"GB/s": num_bytes / found["ours"] / 1e3, "x copy": ratios.pop("ours x copy")}
                table.add(**row, **ratios, microseconds=found)
    table.write(arguments)


if __name__ == "__main__":
    main()
