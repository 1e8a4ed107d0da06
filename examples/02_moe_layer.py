"""The MoE layer in an ordinary model, trained by an ordinary loop.

    python examples/02_moe_layer.py

`evermoe.MoE` replaces a feed-forward layer. Without a session it holds all its experts; a session distributes them over
the workers. The script trains a small model, prints the loss, and shows how the balancing loss evens out the experts'
load.
"""

import torch
from torch import nn

import evermoe

HIDDEN, EXPERTS = 16, 8


class Model(nn.Module):
    """A mixture of experts between two linear layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.experts = evermoe.MoE(HIDDEN, 32, EXPERTS, top_k=2)
        self.head = nn.Linear(HIDDEN, 1)

    def forward(self, x):
        """Map `x` [batch, 8] to [batch, 1]."""
        x = self.embed(x)
        return self.head(x + self.experts(self.norm(x)))


def train(balance):
    """Train with a weight of the balancing loss. Return losses, the busiest load over the mean, and the model."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    x = torch.randn(2048, 8) + 1
    y = torch.sin(x).sum(1, keepdim=True)
    losses = []
    for step in range(60):
        rows = torch.arange(step * 256, (step + 1) * 256) % len(x)
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        total = loss + balance * evermoe.load_balancing_loss(model)
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    tokens_E = model.experts.tokens_E
    return losses, tokens_E.max() / tokens_E.mean(), model


def main():
    """Train with and without the balancing loss."""
    for balance in (0.0, 0.1):
        losses, busiest, model = train(balance)
        print(f"balance {balance}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, busiest expert {busiest:.2f} x the mean")
        assert losses[-1] < losses[0] / 2
    print(model.experts)
    print("layers found:", [name for name, module in model.named_modules() if isinstance(module, evermoe.MoE)])


if __name__ == "__main__":
    main()
