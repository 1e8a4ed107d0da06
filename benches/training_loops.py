"""Training loops without a session, for `preset_worker.py`: plain DDP, torchft's Manager, transformers' experts.

Each has the part of a session's interface that the worker uses. All train the demo's model with AdamW on the batches of
the same sampler, reduce gradients while backward computes others, and clip the gradient's global norm.
"""

import os
from datetime import timedelta
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import get_total_norm

from benches.compare.expert_parallel import ExpertParallel
from benches.compare.program import MAX_GRAD_NORM
from benches.compare.torchft_worker import connect_manager

TIMEOUT = timedelta(seconds=60)


def adamw(parameters):
    """Return the optimizer of all candidates."""
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


class Loss(nn.Module):
    """The loss of a model as a forward, which DistributedDataParallel can wrap."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model.loss(tokens)


class Step:
    """A step of a loop, with the interface of a session's."""

    def __init__(self, loop, number):
        self.number, self.committed, self._loop = number, False, loop
        share = loop.sampler.share(loop.rank, loop.size)
        self.indices, self._weight = share.indices, share.weight * loop.size  # gradients are averaged

    def __enter__(self):
        self._loop.mark("begin")
        self._loop.begin_step()
        return self.indices

    def backward(self, loss):
        (loss * self._weight).backward()

    def __exit__(self, kind, *_):
        if kind is None:
            self._loop.finish_step()
            self._loop.sampler.advance()
            self.committed = True


class Plain:
    """DistributedDataParallel of the same layers, without a session, with experts in fixed groups of torch's.

    A group holds each expert once: P = `experts / expert_slots` workers. With P = 1, DDP reduces the experts, too.
    Otherwise their gradients are summed after backward over the workers that have the same experts.
    """

    def __init__(self, model, sampler, options, mark):
        self.model, self.sampler, self.mark = model, sampler, mark
        self.rank, self.size = int(os.environ["LOCAL_RANK"]), int(os.environ["EVERMOE_MEMBERS"])
        self.group_size = options.experts // options.expert_slots
        self.store = dist.FileStore(f"{options.folder}/rendezvous", self.size)
        self.connect()
        self.loss = self.wrap(self.place_experts(options))

    def steps(self, until):
        for number in range(until):
            yield Step(self, number)

    def connect(self):
        """Connect the workers."""
        store = dist.PrefixStore("ddp", self.store)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=TIMEOUT)

    def place_experts(self, _):
        """Create the optimizer, keep this worker's experts, and return their parameters if P > 1."""
        self.optimizer = adamw(self.model.parameters())
        if self.group_size == 1:
            return []
        parallel = ExpertParallel(self.model, self.optimizer, self.group_size, TIMEOUT.total_seconds())
        parallel.hold(self.rank % self.group_size)
        parallel.connect(self.store, self.rank, self.size)
        mesh = init_device_mesh(
            "cpu", (self.size // self.group_size, self.group_size), mesh_dim_names=("across", "experts")
        )
        self.across, self.group = mesh["across"].get_group(), mesh["experts"].get_group()
        return [block.moe.experts.weights for block in self.model.blocks]

    def wrap(self, experts):
        """Return the loss as a function whose gradients are averaged in backward, except those of `experts`."""
        self._experts, apart = experts, {id(parameter) for parameter in experts}
        self._dense = [parameter for parameter in self.model.parameters() if id(parameter) not in apart]
        loss = Loss(self.model)
        ignored = [name for name, parameter in loss.named_parameters() if id(parameter) in apart]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(loss, ignored)
        return DistributedDataParallel(loss, gradient_as_bucket_view=True)

    def begin_step(self):
        """Clear the gradients."""
        self.optimizer.zero_grad()

    def finish_step(self):
        """Reduce the experts' gradients, clip all by their global norm, and step the optimizer."""
        self.mark("reduce")
        dense, experts = [p.grad for p in self._dense], [local(p.grad) for p in self._experts]
        if experts:
            torch._foreach_div_(experts, self.size)
            self.sum_experts(experts)
        self.mark("send")
        self.mark("vote")
        norm = get_total_norm(dense)
        if experts:
            squares = get_total_norm(experts).square()
            dist.all_reduce(squares, group=self.group)
            norm = (norm.square() + squares).sqrt()
        torch._foreach_mul_([*dense, *experts], (MAX_GRAD_NORM / (norm + 1e-6)).clamp(max=1.0))
        self.mark("update")
        self.optimizer.step()
        self.mark("copy")

    def sum_experts(self, gradients):
        """Sum the experts' gradients over the workers that have the same experts."""
        if self.size > self.group_size:
            for gradient in gradients:
                dist.all_reduce(gradient, group=self.across)


class Torchft(Plain):
    """torchft's Manager and its DistributedDataParallel. Each worker is a replica group and has all experts."""

    def connect(self):
        """Create the Manager; the job's Lighthouse is torchft's."""
        if self.group_size > 1:
            raise ValueError("torchft: expected --placements all, as each replica group has all experts")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def place_experts(self, options):
        """Create the optimizer, which votes by the Manager."""
        from torchft.optim import OptimizerWrapper

        optimizer = adamw(self.model.parameters())
        self.manager = connect_manager(
            self.model, optimizer, self._store, os.environ["EVERMOE_LIGHTHOUSE"], self.rank, TIMEOUT, least=self.size
        )
        self.optimizer = OptimizerWrapper(self.manager, optimizer)
        return []

    def wrap(self, experts):
        """Return the loss in torchft's DistributedDataParallel."""
        from torchft.ddp import DistributedDataParallel as Managed

        self._experts, self._dense = experts, list(self.model.parameters())
        return Managed(self.manager, Loss(self.model), gradient_as_bucket_view=True)


class TransformersMoE(nn.Module):
    """The demo's router with transformers' `Qwen3MoeExperts`, of at most as many parameters as the demo's."""

    def __init__(self, moe, intermediate):
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        super().__init__()
        config = SimpleNamespace(
            num_experts=moe.num_experts,
            hidden_size=moe.hidden,
            moe_intermediate_size=intermediate // 6 * 4,  # of three matrices instead of two; in rows of 16 bytes
            hidden_act="silu",
            _experts_implementation="grouped_mm",
        )
        self.router, self.num_experts, self.experts = moe.router, moe.num_experts, Qwen3MoeExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x):
        """Return the layer's output, and keep its balancing loss."""
        x_TH = x.reshape(-1, x.shape[-1])
        routes = self.router(x_TH)
        counts_E = routes.ids_TK.flatten().bincount(minlength=self.num_experts)
        self.balance_loss = self.num_experts * (counts_E / counts_E.sum() * routes.probabilities_E).sum()
        return self.experts(x_TH, routes.ids_TK.long(), routes.weights_TK).reshape(x.shape)


class Transformers(Plain):
    """transformers' experts and its `AllToAllEP` in the demo's model, with DistributedDataParallel for the rest."""

    def place_experts(self, options):
        """Replace the experts, distribute them with transformers, and create the optimizer."""
        for block in self.model.blocks:
            block.moe = TransformersMoE(block.moe, options.intermediate)
        self.model.loss = self._loss
        experts = []
        if self.group_size > 1:
            from transformers.distributed.expert_parallel import apply_expert_parallelism

            sizes = (self.size // self.group_size, self.group_size, 1)
            mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("across", "experts", "tensor"))
            plan = {}
            for number in range(options.layers):
                path = f"blocks.{number}.moe.experts"
                plan |= {f"{path}.{name}": "grouped_gemm" for name in ("gate_up_proj", "down_proj")}
                plan[path] = "ep_dispatch_experts"
            apply_expert_parallelism(self.model, mesh["experts"], mesh["tensor"], plan)
            self.across, self.group = mesh["across"].get_group(), mesh["experts"].get_group()
            experts = [each for block in self.model.blocks for each in block.moe.experts.parameters()]
        apart = {id(parameter) for parameter in experts}
        dense = [parameter for parameter in self.model.parameters() if id(parameter) not in apart]
        self.optimizer = adamw([{"params": part} for part in (dense, experts) if part])
        return experts

    def _loss(self, tokens):
        logits = self.model(tokens[:, :-1])
        balance = torch.stack([block.moe.balance_loss for block in self.model.blocks]).mean()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) + self.model.balance * balance


def local(gradient):
    """Return this worker's part of a gradient."""
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


LOOPS = {"plain": Plain, "torchft": Torchft, "transformers": Transformers}
"""Loops by the name of their candidate."""
