"""The dispatch operations without a session: send tokens to experts, run the experts, combine the results.

    python examples/01_ops.py

Six calls replace the usual sort, gather and scatter of a mixture-of-experts layer. The script compares their result and
their gradients with a plain loop over the experts. It needs no session and no network. The same code runs on GPU
tensors.
"""

import torch

from evermoe import ops

TOKENS, HIDDEN, EXPERTS, TOP_K = 512, 32, 8, 2


def with_ops(x_TH, ids_TK, weights_TK, matrices_EHH):
    """Compute the layer by evermoe's operations: group rows by expert, multiply per expert, sum with weights."""
    counts_E = ops.expert_histogram(ids_TK, EXPERTS)
    row_ids, positions_TK = ops.dispatch_plan(ids_TK, counts_E[:, None])  # one rank: every row stays here
    rows_NH = ops.permute(x_TH, row_ids, positions_TK)
    blocks = rows_NH.split(counts_E.tolist())
    rows_NH = torch.cat([block @ matrix for block, matrix in zip(blocks, matrices_EHH, strict=True)])
    return ops.unpermute(rows_NH, positions_TK, weights_TK), counts_E


def with_a_loop(x_TH, ids_TK, weights_TK, matrices_EHH):
    """Compute the same layer by a loop over the experts."""
    out_TH = torch.zeros_like(x_TH)
    for expert, matrix in enumerate(matrices_EHH):
        for k in range(TOP_K):
            chosen = ids_TK[:, k] == expert
            out_TH[chosen] += weights_TK[chosen, k, None] * (x_TH[chosen] @ matrix)
    return out_TH


def main():
    """Compute the layer both ways and print the differences."""
    torch.manual_seed(0)
    x_TH = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    matrices_EHH = torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5
    weights_TK, ids_TK = torch.randn(TOKENS, EXPERTS).softmax(-1).topk(TOP_K)

    ours_TH, counts_E = with_ops(x_TH, ids_TK, weights_TK, matrices_EHH)
    plain_TH = with_a_loop(x_TH, ids_TK, weights_TK, matrices_EHH)
    print("tokens per expert:", counts_E.tolist(), "sum", int(counts_E.sum()))
    print(f"largest difference of the results:   {(ours_TH - plain_TH).abs().max():.1e}")

    (ours_grad,) = torch.autograd.grad(ours_TH.square().sum(), x_TH)
    (plain_grad,) = torch.autograd.grad(plain_TH.square().sum(), x_TH)
    print(f"largest difference of the gradients: {(ours_grad - plain_grad).abs().max():.1e}")

    # Three ranks hold replicas of two experts. Each rank computes how many tokens of each expert it sends to each rank.
    counts_ER = torch.tensor([[5, 0, 1], [2, 2, 2]])
    replicas_RE = torch.tensor([[1, 1], [1, 0], [1, 1]])
    send_ER, receive_RE = ops.split_tokens(counts_ER, replicas_RE, rank=0)
    print("rank 0 sends", send_ER.tolist(), "and receives", receive_RE.tolist())

    assert torch.allclose(ours_TH, plain_TH, atol=1e-5)
    assert torch.allclose(ours_grad, plain_grad, atol=1e-4)
    print("the operations and the loop agree")


if __name__ == "__main__":
    main()
