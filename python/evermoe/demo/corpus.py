"""Text for the demo: a file, a folder, or the source code of the Python standard library."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import Tensor

MAX_BYTES = 8 << 20


class Corpus:
    """Text as windows of `sequence + 1` bytes that do not overlap.

    Args:
        path: a file, or a folder whose files are read in name order; None for the standard library's `.py` files.
        sequence: predictions per window.

    Raises:
        ValueError: there is too little text for one window.
    """

    def __init__(self, path: str | None, sequence: int) -> None:
        text = read_text(path)
        self.window = sequence + 1
        if len(text) < self.window:
            raise ValueError(
                f"--data {path}: expected at least {self.window} bytes of text (one window), got {len(text)}"
            )
        used = len(text) // self.window * self.window
        self.windows = torch.frombuffer(bytearray(text[:used]), dtype=torch.uint8).view(-1, self.window)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, indices: Tensor) -> Tensor:
        """Return int64 [len(indices), sequence + 1]."""
        return self.windows[indices].long()


def read_text(path: str | None) -> bytes:
    """Return at most 8 MiB of text."""
    root = Path(path) if path is not None else Path(sysconfig.get_paths()["stdlib"])
    pattern = "*" if path is not None else "*.py"
    files = [root] if root.is_file() else sorted(p for p in root.glob(pattern) if p.is_file())
    if not files:
        raise ValueError(f"--data {root}: expected a text file or a folder with text files, found no file")
    text = bytearray()
    for file in files:
        text += file.read_bytes()
        if len(text) >= MAX_BYTES:
            break
    return bytes(text[:MAX_BYTES])
