"""Folders of weights for other libraries: safetensors files and an index, which appear when all are written."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from torch import Tensor

from evermoe.checkpoint.folder_weights import INDEX
from evermoe.checkpoint.plain_files import flush, make_folder, write_tensors, write_text

SHARD_BYTES = 5_000_000_000
"""Maximum size of a file, unless a single addition is larger."""


class WeightFolder:
    """Writes a folder of weights file by file, as `NAME.writing-…`, and renames it once all files are on disk.

        with WeightFolder("out") as folder:
            folder.add_tensors(tensors)
            folder.publish()

    Drafts of the same name that a killed process has left are removed.

    Raises:
        OSError: the folder is not empty, or cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        self._path = path.absolute()
        if self._path.exists() and any(self._path.iterdir()):
            raise FileExistsError(17, "expected an empty folder", str(path))
        start = f"{self._path.name}.writing-"
        if self._path.parent.is_dir():
            for entry in self._path.parent.iterdir():
                if entry.name.startswith(start):
                    shutil.rmtree(entry, ignore_errors=True)
        self._draft = self._path.with_name(f"{start}{uuid.uuid4().hex[:8]}")
        make_folder(self._draft)
        self._waiting: dict[str, Tensor] = {}
        self._bytes = self._total = 0
        self._files: list[list[str]] = []
        """Keys of each file."""

    def __enter__(self) -> WeightFolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self._draft, ignore_errors=True)  # missing after it was published

    def add_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Add tensors by key, on any device. They are written now or later, and must not change meanwhile.

        Raises:
            OSError: the tensors cannot be written.
        """
        for key, tensor in tensors.items():
            if self._waiting and self._bytes + tensor.nbytes > SHARD_BYTES:
                self._write()
            apart = tensor.detach().to("cpu", copy=True).contiguous()  # safetensors refuses tensors that share memory
            self._waiting[key] = apart
            self._bytes, self._total = self._bytes + tensor.nbytes, self._total + tensor.nbytes

    def _write(self) -> None:
        self._files.append(list(self._waiting))
        write_tensors(self._draft / f"{len(self._files)}.safetensors", self._waiting, {"format": "pt"})
        self._waiting, self._bytes = {}, 0

    def publish(self, add_more: Callable[[Path], None] = lambda draft: None) -> None:
        """Write the remaining tensors, then rename the draft to the folder.

        Raises:
            OSError: the draft cannot be written, or a folder of this name exists by now.
        """
        if self._waiting:
            self._write()
        n = len(self._files)
        names = [f"model-{i + 1:05d}-of-{n:05d}.safetensors" if n > 1 else "model.safetensors" for i in range(n)]
        for number, name in enumerate(names):
            (self._draft / f"{number + 1}.safetensors").rename(self._draft / name)
        if n > 1:
            files = {key: name for name, keys in zip(names, self._files, strict=True) for key in keys}
            index = {"metadata": {"total_size": self._total}, "weight_map": dict(sorted(files.items()))}
            write_text(self._draft / INDEX, json.dumps(index, indent=2) + "\n")
        add_more(self._draft)
        flush(self._draft)
        os.rename(self._draft, self._path)
        flush(self._path.parent)
