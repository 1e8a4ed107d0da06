"""Token dispatch for Mixture-of-Experts layers: which token goes where, and the copies in both directions.

One layer in six lines (`x_TH` tokens, `ids_TK` and `weights_TK` from the router, one rank):

    counts_E = expert_histogram(ids_TK, num_experts)
    row_ids_N, positions_TK = dispatch_plan(ids_TK, counts_E[:, None])
    rows_NH = permute(x_TH, row_ids_N, positions_TK)       # grouped by expert
    rows_NH = experts(rows_NH, counts_E)
    y_TH = unpermute(rows_NH, positions_TK, weights_TK)    # weighted sum per token

Letters: T tokens, K choices of a token, E experts, R ranks, N rows, H columns. A *slot* is one choice,
numbered `t * K + k`. -1 means: no expert (in ids), no slot (in row ids), no row (in positions). Row ids and positions
are int32, 8 bytes a slot together; from 2**31 slots on int64. All functions take either.

All functions take CPU and CUDA tensors, are differentiable where it makes sense, work inside
`torch.compile(fullgraph=True)` with dynamic shapes, and give the same bits whatever the number of threads.
Wrong arguments raise `RuntimeError` with what was expected and what came. On CUDA nothing waits for the GPU,
so it does not check *values*: an id or row out of range counts as -1.
"""

from evermoe.ops import _load  # first: it says which torch is needed

# isort: split
from evermoe.ops import _fakes
from evermoe.ops.dispatch import dispatch_plan, expert_histogram, permute, regroup, split_tokens, unpermute
from evermoe.ops.routing_map import routing_map_to_ids

__all__ = [
    "dispatch_plan",
    "expert_histogram",
    "permute",
    "regroup",
    "routing_map_to_ids",
    "split_tokens",
    "unpermute",
]

del _fakes, _load
