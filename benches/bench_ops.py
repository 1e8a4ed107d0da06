"""Dispatch ops, compared with plain torch and with a copy of the same bytes, in one run.

    python benches/bench_ops.py [--device cuda] [--json PATH] [--tokens 8192 65536] [--hidden 1024 4096]

"copy" is `Tensor.copy_` into memory that is already mapped, with the same number of threads: of the ids for ops that
read ids, of the permuted rows for ops that move rows. The candidates run in turns, so that a slow moment of the machine
affects all of them. "us" is the median, and "x ..." is the median of the ratios of neighbouring turns: below 1 means
faster than the other. "of copy's GB/s" compares the bytes that are read and written per second, each array once. "call"
is the histogram of no ids: the cost of any call.
"""

import itertools

import torch

from common import Table, medians, parse, parser, ratio, take_turns, where
from evermoe import ops
from evermoe.ops.dispatch import expert_histograms, permute_out, unpermute_out
from evermoe.ops.fp8 import dequantize_rows, quantize_rows

raw = torch.ops.evermoe
RANKS = 8
"""Sources and destinations in the cases with several ranks."""


def plain_plan(ids_TK):
    """Plan with plain torch: a stable argsort, and its inverse."""
    row_ids = ids_TK.flatten().argsort(stable=True)
    positions = torch.empty_like(row_ids)
    positions[row_ids] = torch.arange(row_ids.shape[0], device=row_ids.device)
    return row_ids, positions.view(ids_TK.shape)


def draw_ids(tokens, top_k, experts, device):
    """Draw uniform ids, int64 `[T, K]`."""
    return torch.randint(experts, (tokens, top_k), generator=torch.Generator().manual_seed(0)).to(device)


def of_ids(tokens, top_k, experts, device):
    """Yield (op, candidates, bytes that ours reads and writes) of the ops that read ids."""
    ids_TK = draw_ids(tokens, top_k, experts, device)
    layers, ids_copy, none = [ids_TK] * 16, ids_TK.clone(), ids_TK[:0]
    spread_ER = torch.stack([ops.expert_histogram(part, experts) for part in ids_TK.chunk(RANKS)], 1)

    def plan(send_ER=None):
        counts_E = ops.expert_histogram(ids_TK, experts)
        return ops.dispatch_plan(ids_TK, counts_E[:, None] if send_ER is None else send_ER)

    def plain():
        return torch.bincount(ids_TK.flatten(), minlength=experts), plain_plan(ids_TK)

    plan_bytes = 2 * ids_TK.nbytes + 2 * ops.dispatch_plan(ids_TK, spread_ER)[0].nbytes
    bincounts = lambda: [torch.bincount(ids.flatten(), minlength=experts) for ids in layers]  # noqa: E731
    copy = {"copy": lambda: ids_copy.copy_(ids_TK)}
    yield "call", {"ours": lambda: ops.expert_histogram(none, experts)} | copy, 0
    histogram = {"ours": lambda: ops.expert_histogram(ids_TK, experts)}
    histogram["torch"] = lambda: torch.bincount(ids_TK.flatten(), minlength=experts)
    yield "histogram", histogram | copy, ids_TK.nbytes
    of_layers = {"ours": lambda: expert_histograms(layers, experts), "torch": bincounts}
    yield (
        "histograms, 16 layers",
        of_layers | {"copy": lambda: [ids_copy.copy_(ids) for ids in layers]},
        16 * ids_TK.nbytes,
    )
    yield "histogram + plan", {"ours": plan, "torch": plain} | copy, plan_bytes
    yield f"... for {RANKS} ranks", {"ours": lambda: plan(spread_ER), "torch": plain} | copy, plan_bytes


def of_rows(tokens, hidden, experts, top_k, dtype, device):
    """Yield (op, candidates, bytes that ours reads and writes) of the ops that move rows."""
    random = torch.Generator().manual_seed(0)
    ids_TK = draw_ids(tokens, top_k, experts, device)
    x_TH = torch.randn(tokens, hidden, generator=random).to(device, dtype)
    weights_TK = torch.rand(tokens, top_k, generator=random).to(device)
    counts_E = ops.expert_histogram(ids_TK, experts)
    row_ids, positions_TK = ops.dispatch_plan(ids_TK, counts_E[:, None])
    rows_NH = ops.permute(x_TH, row_ids, positions_TK)
    rows_copy, out_TH = rows_NH.clone(), x_TH.clone()
    tokens_of_rows, flat, cast = row_ids // top_k, positions_TK.flatten(), weights_TK.to(dtype)
    counts_Re = torch.full((RANKS, experts), tokens * top_k // (RANKS * experts), device=device)
    counts_Re[-1, -1] += tokens * top_k - counts_Re.sum()
    grads = rows_NH.clone(), weights_TK.clone()
    rows, token_rows = rows_NH.nbytes, x_TH.nbytes
    copy = {"copy": lambda: rows_copy.copy_(rows_NH)}

    def plain_unpermute():
        taken_TKH = rows_NH.index_select(0, flat).view(tokens, top_k, hidden)
        return torch.bmm(cast[:, None, :], taken_TKH)

    permute = {"ours": lambda: ops.permute(x_TH, row_ids, positions_TK)}
    yield "permute", permute | {"torch": lambda: x_TH.index_select(0, tokens_of_rows)} | copy, 2 * rows
    into = {"ours": lambda: permute_out(x_TH, row_ids, positions_TK, rows_NH)}
    yield (
        "permute_out",
        into | {"torch": lambda: torch.index_select(x_TH, 0, tokens_of_rows, out=rows_NH)} | copy,
        2 * rows,
    )
    combine = {"ours": lambda: ops.unpermute(rows_NH, positions_TK, weights_TK), "torch": plain_unpermute}
    yield "unpermute", combine | copy, rows + token_rows
    combine_out = {
        "ours": lambda: unpermute_out(rows_NH, positions_TK, weights_TK, out_TH),
        "torch": plain_unpermute,
    }
    yield "unpermute_out", combine_out | copy, rows + token_rows
    backward = {"ours": lambda: raw.unpermute_backward_out(x_TH, rows_NH, positions_TK, weights_TK, *grads)}
    yield "unpermute_backward_out", backward | copy, 3 * rows
    yield "regroup", {"ours": lambda: ops.regroup(rows_NH, counts_Re)} | copy, 2 * rows
    packed = quantize_rows(rows_NH)
    yield "quantize_rows", {"ours": lambda: quantize_rows(rows_NH)} | copy, rows + packed.nbytes
    back = {"ours": lambda: dequantize_rows(packed, rows_NH.shape[1], rows_NH.dtype)}
    yield "dequantize_rows", back | copy, rows + packed.nbytes


def cases(arguments):
    """Yield (setting, op, candidates, bytes), without rows that take more memory than `--max-gib`."""
    for threads, tokens, top_k in itertools.product(arguments.threads, arguments.tokens, arguments.top_k):
        torch.set_num_threads(threads)
        setting = {"threads": threads, "T": tokens, "K": top_k}
        for experts in arguments.experts:
            for case in of_ids(tokens, top_k, experts, arguments.device):
                yield setting | {"E": experts}, *case
        for hidden, dtype in itertools.product(arguments.hidden, arguments.dtypes):
            if tokens * hidden * top_k * getattr(torch, dtype).itemsize > arguments.max_gib * 2**30:
                continue
            experts = arguments.experts[-1]
            for case in of_rows(tokens, hidden, experts, top_k, getattr(torch, dtype), arguments.device):
                yield setting | {"E": experts, "H": hidden, "dtype": dtype}, *case


def bytes_of_copy(op, setting):
    """Return the bytes that "copy" reads and writes."""
    slots = setting["T"] * setting["K"]
    if "H" in setting:
        return 2 * slots * setting["H"] * getattr(torch, setting["dtype"]).itemsize
    return 2 * slots * torch.int64.itemsize * (16 if "16 layers" in op else 1)


def main():
    """Print a table, and write JSON if `--json` is given."""
    made = parser(__doc__, seconds=0.5)
    made.add_argument("--tokens", type=int, nargs="+", default=[8192])
    made.add_argument("--hidden", type=int, nargs="+", default=[1024])
    made.add_argument("--experts", type=int, nargs="+", default=[8, 64, 256])
    made.add_argument("--top-k", type=int, nargs="+", default=[1, 2, 8])
    made.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    made.add_argument("--max-gib", type=float, default=1.0, help="maximum GiB of rows; larger cases are skipped")
    arguments = parse(made)
    columns = {"op": "24s", "threads": "d", "T": "7d", "H": "6d", "dtype": "10s", "K": "3d", "E": "5d"}
    columns |= {"us": "10.1f", "x torch": "9.2f", "x copy": "8.2f", "of copy's GB/s": ".2f"}
    table = Table(f"ops: torch {torch.__version__}, {where(arguments.device)}", columns)
    for setting, name, candidates, nbytes in cases(arguments):
        times = take_turns(candidates, arguments.seconds, arguments.device)
        against = {f"x {other}": ratio(times, "ours", other) for other in times if other != "ours"}
        share = nbytes / bytes_of_copy(name, setting) / against["x copy"] if nbytes else None
        found = medians(times)
        table.add(op=name, **setting, us=found["ours"], **against, **{"of copy's GB/s": share}, microseconds=found)
    table.write(arguments)


if __name__ == "__main__":
    main()
