"""Workers that are islands: processes of one torch.distributed world, over which FSDP2 divides the dense part."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from evermoe.moe.experts import expert_layers
from support.harness import Job, Worker
from support.worker import Fault, Recorder

WAYS: dict[str, dict[str, int]] = {
    "fsdp": {"dp": 2},
    "fsdp of three": {"dp": 3},
    "hsdp": {"dp_replicate": 2, "dp_shard": 2},
    "fsdp and tp": {"dp": 2, "tp": 2},
    "tp": {"tp": 2},
    "cp": {"cp": 2},
    "one process": {"dp": 1},
}
"""Sizes of the dimensions of a mesh by name, by what divides the model."""


def size_of(way: str) -> int:
    """Processes of an island."""
    first, *others = WAYS[way].values()
    return first * (others[0] if others else 1)


def divide(model: nn.Module, island: dict[str, Any], record: Recorder) -> DeviceMesh:
    """Divide a `worker.Model` over the island of this process, and return the island's mesh.

    Faults may happen in its second layer: before FSDP2's "gather", before the "exchange" of tokens, and in "backward".
    """
    model.second.register_forward_pre_hook(lambda *_: record.fault("gather", record.computing))
    model.second.experts.register_forward_pre_hook(lambda *_: record.fault("exchange", record.computing))
    model.second.experts.register_forward_hook(lambda *found: _in_backward(found[-1], record))
    sizes = WAYS[island["way"]]
    store = dist.FileStore(island["store"], size_of(island["way"]))
    dist.init_process_group("gloo", store=store, rank=island["position"], world_size=size_of(island["way"]))
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "tp" in sizes:
        plan = {
            "embedding": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tp"], plan)
    data_parallel = tuple(name for name in sizes if name != "tp")
    if data_parallel:
        experts = {layer.weights for layer in expert_layers(model).values()}
        for module in (model.embedding, model.first, model.second, model.head, model):
            fully_shard(module, mesh=mesh[data_parallel], ignored_params=experts)  # type: ignore[arg-type]
    if "cp" in sizes:
        length, place = 8 // sizes["cp"], mesh.get_local_rank("cp")
        model.register_forward_pre_hook(lambda _, args: (args[0][:, length * place : length * (place + 1) + 1],))
    if island["dcp"]:
        dcp.load(model.state_dict(), checkpoint_id=island["dcp"])
    return mesh


def _in_backward(output: Tensor, record: Recorder) -> None:
    if output.requires_grad:
        output.register_hook(lambda _: record.fault("backward", record.computing))


def start_island(
    job: Job, name: str, *faults: tuple[int, Fault], way: str = "fsdp", dcp: str = "", **options: Any
) -> list[Worker]:
    """The processes of an island, each a worker `name` with its position; each fault is of one position.

    They first load the model's state from the folder `dcp`, of torch's distributed checkpoints, if there is one.
    """
    store = Path(job.folder) / f"store-{name}-{uuid.uuid4().hex[:8]}"
    session = {"node": f"node-{name}"} | options.pop("session", {})
    return [
        job.start(
            f"{name}{position}",
            *(fault for at, fault in faults if at == position),
            session=session,
            island={
                "store": str(store),
                "position": position,
                "way": way,
                "dcp": dcp,
                "is_copy": position % (WAYS[way].get("tp", 1) * WAYS[way].get("cp", 1)) > 0,
            },
            **options,
        )
        for position in range(size_of(way))
    ]


def check_losses(alone: Worker, workers: Sequence[Worker]) -> None:
    """The losses of all steps, and the norms of all gradients, are those of a process that trains alone."""
    expected = {event["step"]: event for event in alone.events("commit")}
    for each in workers:
        events = {event["step"]: event for event in each.events("commit")}
        assert events.keys() == expected.keys()
        for step, event in events.items():
            for name in ("loss", "grad_norm"):
                assert event[name] == pytest.approx(expected[step][name], rel=1e-5), (each.name, step, name)
            assert event["samples"] == pytest.approx(expected[step]["samples"])
