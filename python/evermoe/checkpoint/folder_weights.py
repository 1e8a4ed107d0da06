"""Initial weights of a deferred model from safetensors files, such as a Hugging Face folder: read unit by unit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from evermoe._native import digest
from evermoe.checkpoint.plain_files import read_plain
from evermoe.errors import CorruptCopy
from evermoe.moe.expert import ROW_ALIGNMENT

INDEX = "model.safetensors.index.json"
INDEX_BYTES = 256 << 20
"""Maximum size of an index."""
MAPPED_BYTES = 64 << 20
"""Bytes read of a file before it is mapped again, so that pages read so far no longer count as this process's."""


class SafetensorsFiles:
    """The tensors of a folder's safetensors files by key, mapped into memory and read on demand.

    Args:
        folder: contains `model.safetensors.index.json` and its files, or only safetensors files.

    Raises:
        CorruptCopy: the folder has no such files, or they cannot be read.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._files = self._find()
        self._open: dict[str, Any] = {}
        self._bytes = 0

    def _find(self) -> dict[str, str]:
        """Return the file of each key."""
        if (self.folder / INDEX).is_file():
            try:
                place = (self.folder / INDEX).resolve()  # the cache of the Hub has links to its files
                found = json.loads(read_plain(place, INDEX_BYTES))["weight_map"]
                return {str(key): str(file) for key, file in found.items()}
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise CorruptCopy(f"{self.folder / INDEX} is not an index of safetensors files: {error}") from None
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            raise CorruptCopy(f"expected safetensors files in {self.folder}, found none")
        return {key: file.name for file in files for key in self._keys_of(file)}

    def _keys_of(self, file: Path) -> list[str]:
        return list(self._opened(file).keys())

    def _opened(self, file: Path) -> Any:
        try:
            return safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise CorruptCopy(f"{file} cannot be read: {error}") from None

    def keys(self) -> list[str]:
        """Return all keys, sorted."""
        return sorted(self._files)

    def describe(self) -> str:
        """Return the number of tensors and the digest of their keys."""
        keys = self.keys()
        return f"{len(keys)} tensors of {digest(np.frombuffer(repr(keys).encode(), np.uint8)):016x}"

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def tensor(self, key: str, part: Any = ...) -> Tensor:
        """Return a read-only tensor, or a part of it by an index such as a number of its first dimension.

        Raises:
            CorruptCopy: the tensor is missing, or cannot be read.
        """
        file = self._files.get(key)
        if file is None:
            raise CorruptCopy(f"{self.folder} has no tensor {key!r}")
        if self._bytes >= MAPPED_BYTES:
            self._open, self._bytes = {}, 0
        try:
            if file not in self._open:
                self._open[file] = self._opened(self.folder / file)
            found: Tensor = self._open[file].get_slice(key)[part]
        except (SafetensorError, OSError, IndexError) as error:
            raise CorruptCopy(f"{key!r} in {self.folder / file} cannot be read: {error}") from None
        self._bytes += found.nbytes
        return found


def refuse_quantised(name: str, found: Tensor) -> None:
    """Refuse weights of fewer than 16 bits, whose scales are other tensors.

    Raises:
        CorruptCopy: the weights are quantised; the message names a remedy.
    """
    if found.dtype.itemsize < 2 and found.dtype != torch.bool:
        raise CorruptCopy(
            f"{name} is quantised to {found.dtype}: expected weights of 16 bits or more; save the model "
            "dequantised first"
        )


ExpertMatrices = Callable[[SafetensorsFiles, str, int], Iterable[Tensor]]
"""Yields an expert's matrices in the order of its row; gets the files, the layer's path and the expert's number."""


class FolderWeights:
    """Reads the initial weights of a deferred model from safetensors files; see `WeightSource`.

        def matrices(files, path, expert):
            return (files.tensor(f"{path}.{expert}.{name}.weight") for name in ("gate_proj", "up_proj", "down_proj"))

        weights = evermoe.FolderWeights("Qwen3-30B-A3B", matrices)
        session = evermoe.Session(model, optimizer, sampler, weights=weights)

    Values are converted to the model's dtypes. Each rank reads only the units that it holds.

    Args:
        folder: as for `SafetensorsFiles`.
        experts: yields an expert's matrices; None for a model without experts.
        key: maps the name of a parameter or buffer to its key in the files; None: the key is the name.

    Raises:
        CorruptCopy: the folder has no such files, or they cannot be read.
    """

    def __init__(
        self,
        folder: str | Path,
        experts: ExpertMatrices | None = None,
        key: Callable[[str], str] | None = None,
    ) -> None:
        self.files = SafetensorsFiles(folder)
        self._experts, self._key = experts, key or (lambda name: name)

    def describe(self) -> str:
        """Return the number of tensors and the digest of their keys."""
        return self.files.describe()

    def fill(self, path: str, module: nn.Module, tensors: Mapping[str, Tensor], expert: int | None) -> None:
        """Write the initial values of one unit; see `WeightSource`."""
        if expert is not None:
            self._fill_expert(path, tensors["weights"], expert)
            return
        for name, tensor in tensors.items():
            key = self._key(f"{path}.{name}" if path else name)
            found = self.files.tensor(key)
            if found.shape != tensor.shape:
                shapes = f"expected {list(tensor.shape)}, found {list(found.shape)}"
                raise CorruptCopy(f"{key!r} in {self.files.folder} belongs to another model: {shapes}")
            refuse_quantised(f"{key} in {self.files.folder}", found)
            tensor.copy_(found)

    def _fill_expert(self, path: str, row: Tensor, expert: int) -> None:
        if self._experts is None:
            raise CorruptCopy(f"FolderWeights: expected `experts`, which yields the matrices of {path}, got none")
        start = 0
        for matrix in self._experts(self.files, path, expert):
            refuse_quantised(f"expert {expert} of {path} in {self.files.folder}", matrix)
            part = row[start : start + matrix.numel()]
            if part.numel() < matrix.numel():
                start += matrix.numel()
                break
            part.copy_(matrix.reshape(-1))
            start += matrix.numel()
        if not start <= len(row) < start + ROW_ALIGNMENT:
            raise CorruptCopy(
                f"expert {expert} of {path} belongs to another model: expected {len(row)} numbers, found {start}"
            )
        row[start:] = 0
