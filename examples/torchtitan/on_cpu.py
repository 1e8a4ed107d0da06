"""Lets torchtitan 0.3 run on CPUs, and on torch 2.11. Import it before a model of torchtitan.

With GPUs, and the torch for which torchtitan was released, none of this is needed.
"""

import dataclasses
import warnings

import torch
import torch.distributed.fsdp
from torchtitan.config.override import override
from torchtitan.distributed import parallel_dims

if not torch.cuda.is_available():
    parallel_dims.device_type = "cpu"  # torchtitan assumes CUDA where it finds no accelerator
    warnings.filterwarnings("ignore", "In CPU autocast")  # the router's scores are float32 without autocast
if not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"):
    # torchtitan imports it with each model; the backend `partial_dtensor` does not use it.
    fields = ["shard", "replicate"]
    torch.distributed.fsdp.DataParallelMeshDims = dataclasses.make_dataclass("DataParallelMeshDims", fields)

from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention


@override(target=FlexAttention.Config)
def plain_attention(_config):
    """Replace FlexAttention, whose backward needs a GPU."""
    return ScaledDotProductAttention.Config()
