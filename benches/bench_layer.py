"""Forward and backward of a complete MoE layer, compared with the usual ways to write one in plain torch, in one run.

    python benches/bench_layer.py [--device cuda] [--json PATH] [--tokens 4096] [--experts 8 64] [--threads 1 2]

| candidate | what it does |
|---|---|
| evermoe | `evermoe.MoE` by itself |
| transformers | experts of that library as it runs them by default: `experts_implementation="grouped_mm"` |
| torchtitan | stable argsort, gathered rows, `grouped_mm`, weights, `scatter_add`; bfloat16 is compiled |
| experts | only the matrix products of the same experts, on rows in expert order: a lower bound for any layer |

All have the same weights, tokens and choices of experts (without the router). The candidates run in turns;
times are medians, and "x experts" and "x ..." are medians of ratios.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from common import Table, medians, parse, parser, ratio, take_turns, where
from evermoe import ops


class Case:
    """Tokens, choices and weights of one setting: gated experts, all of one size."""

    def __init__(self, tokens, hidden, intermediate, experts, top_k, dtype, device):
        random = torch.Generator().manual_seed(0)

        def draw(*shape):
            return torch.randn(*shape, generator=random).to(device, dtype)

        self.x_TH, self.grad_TH = draw(tokens, hidden).requires_grad_(), draw(tokens, hidden)
        logits_TE = torch.randn(tokens, experts, generator=random)
        weights_TK, self.ids_TK = (t.to(device) for t in logits_TE.softmax(-1).topk(top_k))
        self.weights_TK = (weights_TK / weights_TK.sum(-1, keepdim=True)).requires_grad_()
        shape = (experts, intermediate, hidden)
        self.gate, self.up = ((draw(*shape) * hidden**-0.5).requires_grad_() for _ in range(2))
        self.down = (draw(experts, hidden, intermediate) * intermediate**-0.5).requires_grad_()
        self.library = Qwen3MoeExperts(
            SimpleNamespace(
                num_experts=experts,
                hidden_size=hidden,
                moe_intermediate_size=intermediate,
                hidden_act="silu",
                _experts_implementation="grouped_mm",
            )
        ).to(device, dtype)
        with torch.no_grad():
            self.library.gate_up_proj.copy_(torch.cat([self.gate, self.up], 1))
            self.library.down_proj.copy_(self.down)
        compiles = dtype == torch.bfloat16  # the only type whose `grouped_mm` torch can compile
        self.titan = torch.compile(self.torchtitan, dynamic=False) if compiles else self.torchtitan
        self.counts_E = ops.expert_histogram(self.ids_TK, experts)
        row_ids, positions_TK = ops.dispatch_plan(self.ids_TK, self.counts_E[:, None])
        self.sorted_NH = ops.permute(self.x_TH.detach(), row_ids, positions_TK).requires_grad_()
        self.grad_NH = torch.ones_like(self.sorted_NH)

    def leaves(self):
        """Return all tensors that get a gradient."""
        return [self.x_TH, self.weights_TK, self.gate, self.up, self.down, self.sorted_NH, *self.library.parameters()]

    def grouped(self, rows_NH, counts_E):
        """Apply the experts to rows in expert order."""
        ends_E = counts_E.cumsum(0).int()
        gate, up, down = (weight.transpose(1, 2) for weight in (self.gate, self.up, self.down))
        inner = F.silu(F.grouped_mm(rows_NH, gate, offs=ends_E)) * F.grouped_mm(rows_NH, up, offs=ends_E)
        return F.grouped_mm(inner, down, offs=ends_E)

    def evermoe(self):
        """Compute the layer by evermoe's ops around the same experts."""
        counts_E = ops.expert_histogram(self.ids_TK, self.gate.shape[0])
        row_ids, positions_TK = ops.dispatch_plan(self.ids_TK, counts_E[:, None])
        rows_NH = ops.permute(self.x_TH, row_ids, positions_TK)
        return ops.unpermute(self.grouped(rows_NH, counts_E), positions_TK, self.weights_TK)

    def transformers(self):
        """Compute the layer by transformers' own module, with the same weights in its layout."""
        return self.library(self.x_TH, self.ids_TK, self.weights_TK.to(self.x_TH.dtype))

    def torchtitan(self):
        """Compute the layer as torchtitan's `MoE.forward` does, with the weights applied after the experts."""
        top_k = self.ids_TK.shape[1]
        counts_E = torch.histc(self.ids_TK.float(), self.gate.shape[0], 0, self.gate.shape[0])
        order_N = torch.argsort(self.ids_TK.view(-1), stable=True)
        token_N = order_N // top_k
        index_NH = token_N[:, None].expand(-1, self.x_TH.shape[1])
        rows_NH = torch.gather(self.x_TH, 0, index_NH)
        out_NH = self.grouped(rows_NH, counts_E.long())
        weighted_NH = (out_NH.float() * self.weights_TK.view(-1)[order_N, None]).to(self.x_TH.dtype)
        return torch.zeros_like(self.x_TH).scatter_add(0, index_NH, weighted_NH)

    def run(self, forward, grad):
        """Run forward and backward, with new gradients."""
        for leaf in self.leaves():
            leaf.grad = None
        forward().backward(grad)

    def candidates(self):
        """Return the functions by name."""
        functions = {"evermoe": self.evermoe, "transformers": self.transformers, "torchtitan": self.titan}
        made = {name: lambda f=f: self.run(f, self.grad_TH) for name, f in functions.items()}
        experts = lambda: self.grouped(self.sorted_NH, self.counts_E)  # noqa: E731
        return made | {"experts": lambda: self.run(experts, self.grad_NH)}


def main():
    """Print a table, and write JSON if `--json` is given."""
    made = parser(__doc__, seconds=5.0)
    made.add_argument("--tokens", type=int, default=4096)
    made.add_argument("--hidden", type=int, default=1024)
    made.add_argument("--intermediate", type=int, default=512)
    made.add_argument("--experts", type=int, nargs="+", default=[8, 64])
    made.add_argument("--top-k", type=int, nargs="+", default=[2, 8])
    made.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    arguments = parse(made)
    sizes = f"T = {arguments.tokens}, H = {arguments.hidden}, I = {arguments.intermediate}"
    columns = {"threads": "d", "dtype": "10s", "E": "4d", "K": "4d", "evermoe ms": ".1f", "x experts": ".2f"}
    columns |= {"x transformers": ".2f", "x torchtitan": ".2f"}
    table = Table(
        f"layer, forward and backward: torch {torch.__version__}, {where(arguments.device)}, {sizes}", columns
    )
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for dtype in arguments.dtypes:
            for experts in arguments.experts:
                for top_k in arguments.top_k:
                    shape = (arguments.tokens, arguments.hidden, arguments.intermediate, experts, top_k)
                    case = Case(*shape, getattr(torch, dtype), arguments.device)
                    times = take_turns(case.candidates(), arguments.seconds, arguments.device)
                    table.add(
                        **{"threads": threads, "dtype": dtype, "E": experts, "K": top_k},
                        **{"evermoe ms": medians(times)["evermoe"] / 1e3, "microseconds": medians(times)},
                        **{f"x {name}": ratio(times, "evermoe", name) for name in times if name != "evermoe"},
                    )
    table.write(arguments)


if __name__ == "__main__":
    main()
