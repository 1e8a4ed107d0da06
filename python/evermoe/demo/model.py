"""A byte-level GPT whose feed-forward layers are mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evermoe import MoE, load_balancing_loss

VOCABULARY = 256


class Block(nn.Module):
    """Causal self-attention, then a mixture of experts, both residual and on normalised input."""

    def __init__(self, hidden: int, heads: int, intermediate: int, experts: int, top_k: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.project = nn.Linear(hidden, hidden)
        self.norm_experts = nn.LayerNorm(hidden)
        self.moe = MoE(hidden, intermediate, experts, top_k)

    def forward(self, x: Tensor) -> Tensor:
        """Run the block on `x` [batch, sequence, hidden]."""
        batch, sequence, hidden = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(batch, sequence, 3, self.heads, hidden // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(attended.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.moe(self.norm_experts(x))


class ByteGPT(nn.Module):
    """GPT that predicts the next byte. `balance` weighs the load-balancing loss of the routers."""

    def __init__(
        self,
        *,
        layers: int,
        hidden: int,
        heads: int,
        intermediate: int,
        experts: int,
        top_k: int,
        sequence: int,
        balance: float = 0.01,
    ) -> None:
        super().__init__()
        self.balance = balance
        self.embed = nn.Embedding(VOCABULARY, hidden)
        self.position = nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, intermediate, experts, top_k) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, VOCABULARY, bias=False)

    def forward(self, bytes_BS: Tensor) -> Tensor:
        """Return logits [batch, sequence, 256] of int64 bytes [batch, sequence]."""
        positions = torch.arange(bytes_BS.shape[1], device=bytes_BS.device)
        x = self.embed(bytes_BS) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, bytes_BS: Tensor) -> Tensor:
        """Return the mean cross entropy of each next byte, plus the weighted load-balancing loss; input [batch,
        sequence + 1]."""
        logits = self(bytes_BS[:, :-1])
        entropy = F.cross_entropy(logits.flatten(0, 1), bytes_BS[:, 1:].flatten())
        return entropy + self.balance * load_balancing_loss(self)
