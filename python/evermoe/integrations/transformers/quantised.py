"""Weights that are published in fewer than 16 bits, dequantised while they are read: MXFP4 and FP8 with block scales.

GPT-OSS is published in MXFP4: `…_blocks` has two values of E2M1 in a byte, and `…_scales` one exponent of E8M0 for 32
values (OCP Microscaling Formats v1.0, section 5). DeepSeek-V3 is published in FP8: E4M3 with a float32 scale for each
block of 128 x 128 (arXiv 2412.19437, section 3.3.2), in `weight_scale_inv`. transformers says which tensors of a folder
belong together; the values are those of its own dequantisation.

A matrix is dequantised piece by piece into its place. So reading one takes the memory of a piece, not of a second
matrix.

transformers 5.23 takes the size of FP8 blocks from the shapes. That is another size where the last block of a matrix is
a smaller one (`kv_a_proj_with_mqa` of DeepSeek-V3 has 576 rows, in blocks of 128 and one of 64); it refuses most of
these matrices. Here the size is the configuration's `weight_block_size`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import FineGrainedFP8Config, Mxfp4Config, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.quantizers.quantizer_mxfp4 import Mxfp4HfQuantizer

from evermoe.checkpoint.folder_weights import refuse_quantised
from evermoe.checkpoint.plain_files import read_plain
from evermoe.errors import CorruptCopy, UnsupportedState

PIECE_VALUES = 1 << 17
"""Values that are dequantised at a time, at least a row of blocks. Their temporary tensors take about 20 bytes each."""
CONFIG, CONFIG_BYTES = "config.json", 16 << 20
FIELD = "quantization_config"
METHODS: dict[str, tuple[type[HfQuantizer], Any]] = {
    "mxfp4": (Mxfp4HfQuantizer, Mxfp4Config),
    "fp8": (FineGrainedFP8HfQuantizer, FineGrainedFP8Config),
}
"""Supported values of a configuration's `quant_method`."""
SCALES = ("_scales", "_scale_inv", "activation_scale")
"""Ends of the patterns of tensors that belong to others."""


def read_fields(folder: Path) -> dict[str, Any]:
    """Return the fields of a folder's config.json; empty if it has none."""
    place = (folder / CONFIG).resolve()  # the cache of the Hub has links to its files
    found = json.loads(read_plain(place, CONFIG_BYTES)) if place.is_file() else {}
    return found if isinstance(found, dict) else {}


def quantizer_of(folder: Path) -> HfQuantizer | None:
    """Return transformers' quantizer for a folder, set to dequantise; None for weights of 16 bits or more.

    Raises:
        UnsupportedState: the folder has another quantisation.
    """
    config = read_fields(folder)
    found = config.get(FIELD) or (config.get("text_config") or {}).get(FIELD)
    if not found:
        return None
    method = found.get("quant_method")
    if method not in METHODS:
        raise UnsupportedState(
            f"{folder} is quantised with quant_method {method!r}: expected {' or '.join(map(repr, METHODS))}, or "
            "weights of 16 bits or more. Save the model dequantised first"
        )
    quantizer, options = METHODS[method]
    return quantizer(options.from_dict({**found, "dequantize": True}), pre_quantized=True)


def forget_quantisation(config: PretrainedConfig) -> PretrainedConfig:
    """Remove the quantisation of a folder's weights from its configuration, in place: a model in training has none."""
    for each in (config, config.get_text_config()):
        if hasattr(each, FIELD):
            delattr(each, FIELD)
    return config


def save_dequantised(model: PreTrainedModel) -> None:
    """Make a model that transformers has dequantised save its weights as they are.

    transformers' conversions would quantise them again, without a word of it in the configuration; 5.23 fails in that.
    """
    found: Any = getattr(model, "_weight_conversions", None)
    if not any(map(_dequantises, found or [])):
        return
    plain = [each for each in get_model_conversion_mapping(model) if isinstance(each, WeightConverter)]
    by_target = {tuple(each.target_patterns): each for each in plain}
    new = (by_target.get(tuple(each.target_patterns)) if _dequantises(each) else each for each in found)
    model._weight_conversions = [each for each in new if each is not None]


def _dequantises(conversion: Any) -> bool:
    return any(map(is_dequantising, getattr(conversion, "operations", ())))


def is_dequantising(operation: Any) -> bool:
    """Return whether an operation of transformers' conversions dequantises."""
    return hasattr(operation, "hf_quantizer")


class Matrix(NamedTuple):
    """A tensor in the files, or a part of one."""

    shape: list[int]
    """As the model has it."""
    write: Callable[[Tensor], object]
    """Writes the values to a tensor of this shape, of any dtype and strides."""
    plain: Tensor | None = None
    """The values in the files, if they are not quantised."""

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return the values: in the files' dtype if they are not quantised, else in `dtype`."""
        if self.plain is not None:
            return self.plain
        values = torch.empty(self.shape, dtype=dtype)
        self.write(values)
        return values


def as_it_is(values: Tensor) -> Matrix:
    """Return a tensor that is not quantised."""
    return Matrix(list(values.shape), lambda target: target.copy_(values), values)


def matrices(found: Mapping[str, list[Tensor]], quantizer: HfQuantizer | None, name: str) -> dict[str, list[Matrix]]:
    """Return the matrices of tensors that transformers converts together, each with its scales.

    Args:
        found: tensors by the pattern of their key; scales have patterns of their own.
        quantizer: of the folder.
        name: of the tensors, for messages.

    Raises:
        CorruptCopy: scales are missing or have another shape.
    """
    result: dict[str, list[Matrix]] = {}
    is_mxfp4 = isinstance(quantizer, Mxfp4HfQuantizer)
    for pattern, tensors in found.items():
        scales = found.get(f"{pattern.removesuffix('_blocks')}_scales" if is_mxfp4 else f"{pattern}_scale_inv")
        if quantizer is None or (scales is None and not pattern.endswith(SCALES)):
            for each in tensors:
                refuse_quantised(name, each)
            result[pattern] = [as_it_is(each) for each in tensors]
        elif scales is not None:
            if len(scales) != len(tensors):
                raise CorruptCopy(f"{name}: {len(tensors)} quantised tensors have {len(scales)} tensors of scales")
            size = None if is_mxfp4 else quantizer.quantization_config.weight_block_size
            pairs = zip(tensors, scales, strict=True)
            result[pattern] = [_mxfp4(name, *pair) if is_mxfp4 else _fp8(name, *pair, size) for pair in pairs]
    if not result:
        raise CorruptCopy(f"{name}: there are scales, but no weights")
    return result


def _mxfp4(name: str, blocks: Tensor, scales: Tensor) -> Matrix:
    """Return experts' matrices `[E, G * 32, rows]` of uint8 `blocks [E, rows, G, 16]` and `scales [E, rows, G]`."""
    if blocks.dim() != 4 or blocks.shape[:-1] != scales.shape:
        raise CorruptCopy(
            f"{name}: expected blocks [experts, rows, groups, bytes] with a scale for each group, got "
            f"{list(blocks.shape)} and scales {list(scales.shape)}"
        )
    experts, rows, groups, size = blocks.shape
    width = groups * size * 2

    def write(target: Tensor) -> None:
        step = max(1, PIECE_VALUES // (experts * width))
        for row in range(0, rows, step):
            piece = slice(row, row + step)
            target[:, :, piece] = convert_moe_packed_tensors(blocks[:, piece], scales[:, piece], dtype=target.dtype)

    return Matrix([experts, width, rows], write)


def _fp8(name: str, values: Tensor, scales: Tensor, size: list[int] | None) -> Matrix:
    """Return the matrix `[..., rows, columns]` of `values` in E4M3, or two of E2M1 in a byte, with `scales`."""
    is_packed = values.dtype in (torch.int8, torch.float4_e2m1fn_x2)
    shape = [*values.shape[:-1], values.shape[-1] * (1 + is_packed)]
    rows, columns = shape[-2:]
    if scales.dim() < 2 and scales.numel() > 1:
        raise CorruptCopy(f"{name}: expected scales [..., rows, columns] of blocks, got {list(scales.shape)}")
    grid = tuple(scales.shape[-2:]) if scales.dim() > 1 else (1, 1)
    height, width = size or (0, 0)
    if not size or grid != (-(-rows // height), -(-columns // width)):  # experts may have blocks of their own
        if rows % grid[0] or columns % grid[1]:
            raise CorruptCopy(
                f"{name}: {shape} values have scales {list(scales.shape)}, which are not those of blocks of {size}"
            )
        height, width = rows // grid[0], columns // grid[1]
    factors = (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()
    factors = factors.reshape(*scales.shape[:-2], *grid)

    def write(target: Tensor) -> None:
        step = height * max(1, PIECE_VALUES // (height * target[..., 0, :].numel()))
        for row in range(0, rows, step):
            piece = values[..., row : row + step, :]
            wide = Fp8Dequantize(None)._unpack_fp4(piece) if is_packed else piece.float()
            down = factors[..., row // height : -(-(row + step) // height), :]
            down = down.repeat_interleave(height, -2)[..., : wide.shape[-2], :]
            wide *= down.repeat_interleave(width, -1)[..., :columns]
            target[..., row : row + step, :] = wide

    return Matrix(shape, write)
