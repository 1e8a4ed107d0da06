"""Folders in the formats in which GPT-OSS and DeepSeek-V3 are published, written here from small random models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from support.hub import build

BLOCK = 128
BETWEEN = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
"""Halfway between the values of E2M1: 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
NOT_IN_FP8 = ("embed_tokens", "lm_head", "norm", "mlp.gate.weight")
SIZES: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"hidden_size": 256, "moe_intermediate_size": 128},
    "gpt-oss": {"hidden_size": 64, "intermediate_size": 96},
}
"""Of models with several blocks in a matrix, which transformers can dequantise."""


def spread(scales: Tensor, shape: torch.Size) -> Tensor:
    """Return the scale of each value."""
    rows = scales.repeat_interleave(BLOCK, 0)[: shape[0]]
    return rows.repeat_interleave(BLOCK, 1)[:, : shape[1]]


def to_fp8(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8_e4m3fn `[rows, columns]`, and a float32 scale for each block of 128 x 128, smaller at the edges."""
    grid = [-(-size // BLOCK) for size in weights.shape]
    padded = torch.zeros(grid[0] * BLOCK, grid[1] * BLOCK)
    padded[: weights.shape[0], : weights.shape[1]] = weights.float()
    scales = padded.view(grid[0], BLOCK, grid[1], BLOCK).abs().amax((1, 3)).clamp(min=1e-12) / 448
    return (weights.float() / spread(scales, weights.shape)).to(torch.float8_e4m3fn), scales


def to_mxfp4(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return uint8 blocks `[E, rows, G, 16]` and scales `[E, rows, G]` of experts' matrices `[E, G * 32, rows]`."""
    groups = weights.float().transpose(1, 2).unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).clamp(min=1e-30).log2().floor().sub(2).clamp(-127, 127)
    scaled = groups / exponents.exp2().unsqueeze(-1)
    codes = torch.bucketize(scaled.abs().contiguous(), BETWEEN).to(torch.uint8) | ((scaled < 0).to(torch.uint8) << 3)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), (exponents + 127).to(torch.uint8)


def _quantised(key: str, tensor: Tensor, method: str) -> dict[str, Tensor]:
    if method == "mxfp4" and key.endswith(("gate_up_proj", "down_proj")):
        return dict(zip((f"{key}_blocks", f"{key}_scales"), to_mxfp4(tensor), strict=True))
    if method == "fp8" and tensor.dim() == 2 and not any(each in key for each in NOT_IN_FP8):
        return dict(zip((key, f"{key}_scale_inv"), to_fp8(tensor), strict=True))
    return {key: tensor}


def write_folder(folder: Path, name: str, shard: str = "50GB", **sizes: Any) -> Any:
    """Write the folder of a model of `support.hub`, quantised as it is published, and return the model in bfloat16."""
    model = build(name, **{**SIZES[name], **sizes}).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size=shard)
    method = FP8 if name == "deepseek-v3" else MXFP4
    files: dict[str, str] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors: dict[str, Tensor] = {}
        for key, tensor in load_file(path).items():
            tensors |= _quantised(key, tensor, str(method["quant_method"]))
        files |= dict.fromkeys(tensors, path.name)
        save_file({key: each.contiguous() for key, each in tensors.items()}, path, {"format": "pt"})
    if len(set(files.values())) > 1:
        index = {"metadata": {}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    return model
