"""Experts of transformers' models: forward and backward by evermoe, compared with transformers' own, in one run.

    python benches/bench_transformers.py [--device cuda] [--json PATH] [--tokens 2048] [--threads 1]

| candidate | what it does |
|---|---|
| evermoe | the module behind `experts_implementation="evermoe"` |
| elastic | the same as `ElasticExperts`, on one rank |
| grouped_mm | transformers' `experts_implementation="grouped_mm"`: sort, gather, `grouped_mm`, weights, gather, sum |
| eager | transformers' `experts_implementation="eager"`: a loop over the experts |

All have the same weights, tokens and choices. They run in turns. "x grouped_mm" and "x eager" are medians of the ratios
of time: below 1, evermoe is faster.
"""

import copy
from types import SimpleNamespace

import torch
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from common import Table, medians, parse, parser, ratio, take_turns, where
from evermoe.integrations.transformers.elastic import ElasticExperts

HIDDEN = 256
CASES = {
    "8 x k2": (Qwen3MoeExperts, 8, 512, 2),
    "64 x k8": (Qwen3MoeExperts, 64, 64, 8),
    "GPT-OSS 32 x k4": (GptOssExperts, 32, 256, 4),
}


def make(kind, experts, intermediate):
    """Return a module of transformers with random weights."""
    config = SimpleNamespace(
        hidden_size=HIDDEN,
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


def candidates(kind, experts, intermediate, top_k, tokens, dtype, device):
    """Return the candidates: each runs forward and backward of its own copy of the experts."""
    torch.manual_seed(0)
    source = make(kind, experts, intermediate).to(device, dtype)
    x_TH, grad_TH = (torch.randn(tokens, HIDDEN, device=device, dtype=dtype) for _ in range(2))
    weights_TK, ids_TK = torch.randn(tokens, experts, device=device).softmax(-1).topk(top_k)

    def runs(module):
        x, weights = x_TH.clone().requires_grad_(), weights_TK.to(dtype).requires_grad_()

        def run():
            for tensor in (x, weights, *module.parameters()):
                tensor.grad = None
            module(x, ids_TK, weights).backward(grad_TH)

        return run

    found = {"elastic": runs(ElasticExperts(copy.deepcopy(source)))}
    for name in ("evermoe", "grouped_mm", "eager"):
        module = copy.deepcopy(source)
        module.config = copy.copy(source.config)
        module.config._experts_implementation = name
        found[name] = runs(module)
    return found


def main():
    """Print a row for each setting."""
    made = parser(__doc__, seconds=4, threads=(1,))
    made.add_argument("--tokens", type=int, default=2048)
    arguments = parse(made)
    columns = {"experts": "18s", "dtype": "10s", "threads": "d", "evermoe ms": ".2f", "x grouped_mm": ".2f"}
    columns |= {"x eager": ".2f", "elastic x grouped_mm": ".2f"}
    sizes = f"T = {arguments.tokens}, H = {HIDDEN}"
    table = Table(
        f"experts, forward and backward: torch {torch.__version__}, {where(arguments.device)}, {sizes}", columns
    )
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for name, (kind, experts, intermediate, top_k) in CASES.items():
            for dtype in (torch.float32, torch.bfloat16):
                each = candidates(kind, experts, intermediate, top_k, arguments.tokens, dtype, arguments.device)
                times = take_turns(each, arguments.seconds, arguments.device)
                table.add(
                    **{"experts": name, "dtype": str(dtype).removeprefix("torch."), "threads": threads},
                    **{"evermoe ms": medians(times)["evermoe"] / 1e3, "microseconds": medians(times)},
                    **{f"x {other}": ratio(times, "evermoe", other) for other in ("grouped_mm", "eager")},
                    **{"elastic x grouped_mm": ratio(times, "elastic", "grouped_mm")},
                )
    table.write(arguments)


if __name__ == "__main__":
    main()
