"""Experts of transformers' models: forward and backward by evermoe, compared with transformers' own, in one run.

    python benches/bench_transformers.py [--device cuda] [--json PATH] [--tokens 2048] [--threads 1]

| candidate | what it does |
|---|---|
| evermoe | the module behind `experts_implementation="evermoe"` |
| elastic | the same as `ElasticExperts`, on one rank |
| grouped_mm | transformers' default: sort, gather, `grouped_mm`, weights, gather, sum |

All have the same weights, tokens and choices. They run in turns. "x grouped_mm" is the median of the ratios
of time: below 1, evermoe is faster.
"""

import copy
from types import SimpleNamespace

import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from common import Table, medians, parse, parser, ratio, take_turns, where
from evermoe.integrations.transformers.elastic import ElasticExperts

CASES = {
    "8 x k2": (Qwen3MoeExperts, 8, 512, 2),
    "64 x k8": (Qwen3MoeExperts, 64, 64, 8),
    "GPT-OSS 32 x k4": (GptOssExperts, 32, 256, 4),
}


def make(kind, hidden, experts, intermediate):
    """Return a module of transformers with random weights."""
    config = SimpleNamespace(
        hidden_size=hidden,
        intermediate_size=intermediate,
        moe_intermediate_size=intermediate,
        num_experts=experts,
        num_local_experts=experts,
        hidden_act="silu",
        swiglu_alpha=1.702,
        swiglu_limit=7.0,
        _experts_implementation="eager",
    )
    module = kind(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    return module


def candidates(kind, hidden, experts, intermediate, top_k, tokens, dtype, device):
    """Return the candidates: each runs forward and backward of its own copy of the experts."""
    torch.manual_seed(0)
    source = make(kind, hidden, experts, intermediate).to(device, dtype)
    x_TH, grad_TH = (torch.randn(tokens, hidden, device=device, dtype=dtype) for _ in range(2))
    weights_TK, ids_TK = torch.randn(tokens, experts, device=device).softmax(-1).topk(top_k)

    def runs(module):
        x, weights = x_TH.clone().requires_grad_(), weights_TK.to(dtype).requires_grad_()

        def run():
            for tensor in (x, weights, *module.parameters()):
                tensor.grad = None
            module(x, ids_TK, weights).backward(grad_TH)

        return run

    found = {"elastic": runs(ElasticExperts(copy.deepcopy(source)))}
    for name in ("evermoe", "grouped_mm"):
        module = copy.deepcopy(source)
        module.config = copy.copy(source.config)
        module.config._experts_implementation = name
        found[name] = runs(module)
    return found


def main():
    """Print a row for each setting."""
    made = parser(__doc__, seconds=4, threads=(1,))
    made.add_argument("--tokens", type=int, default=2048)
    made.add_argument("--hidden", type=int, default=256, help="2048 or more on a GPU (%(default)s)")
    arguments = parse(made)
    columns = {"experts": "18s", "dtype": "10s", "threads": "d", "evermoe ms": ".2f", "x grouped_mm": ".2f"}
    columns |= {"elastic x grouped_mm": ".2f"}
    sizes = f"T = {arguments.tokens}, H = {arguments.hidden}"
    table = Table(
        f"experts, forward and backward: torch {torch.__version__}, {where(arguments.device)}, {sizes}", columns
    )
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for name, (kind, experts, intermediate, top_k) in CASES.items():
            for dtype in (torch.float32, torch.bfloat16):
                each = candidates(
                    kind, arguments.hidden, experts, intermediate, top_k, arguments.tokens, dtype, arguments.device
                )
                times = take_turns(each, arguments.seconds, arguments.device)
                table.add(
                    **{"experts": name, "dtype": str(dtype).removeprefix("torch."), "threads": threads},
                    **{"evermoe ms": medians(times)["evermoe"] / 1e3, "microseconds": medians(times)},
                    **{"x grouped_mm": ratio(times, "evermoe", "grouped_mm")},
                    **{"elastic x grouped_mm": ratio(times, "elastic", "grouped_mm")},
                )
    table.write(arguments)


if __name__ == "__main__":
    main()
