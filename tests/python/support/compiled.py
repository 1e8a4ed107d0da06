"""Code that nvcc made of the kernels, read from this build by NVIDIA's own tools."""

from __future__ import annotations

import fcntl
import glob
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import evermoe._native


def tool(name: str) -> str | None:
    """A program of pip's nvidia wheels, or of PATH."""
    found = [
        path for place in sys.path for path in sorted(glob.glob(os.path.join(place, "nvidia", "cu*", "bin", name)))
    ]
    return found[-1] if found else shutil.which(name)


def fat_binaries() -> Iterator[bytes]:
    """The kernels' binaries, as they lie in the library: a head of 16 bytes states the size of the rest."""
    library = Path(str(evermoe._native.__file__)).read_bytes()
    for match in re.finditer(re.escape(struct.pack("<I", 0xBA55ED50)), library):
        _, _, head, size = struct.unpack_from("<IHHQ", library, match.start())
        if head == 16:
            yield library[match.start() : match.start() + head + size]


def disassembled(folder: Path) -> dict[str, str]:
    """The texts of cuobjdump: resource usage, SASS and PTX. Made once for all processes that test this library."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        file = folder / "texts.json"
        if not file.exists():
            draft = folder / "texts.new"
            draft.write_text(json.dumps(disassemble(folder)))
            draft.rename(file)
        return json.loads(file.read_text())


def disassemble(folder: Path, options: Sequence[str] = ("-res-usage", "-sass", "-ptx")) -> dict[str, str]:
    """The texts of cuobjdump for all binaries, by option."""
    texts = dict.fromkeys(options, "")
    path = os.pathsep.join([os.path.dirname(tool("nvdisasm") or ""), os.environ["PATH"]])
    for i, binary in enumerate(fat_binaries()):
        file = folder / f"{i}.fatbin"
        file.write_bytes(binary)
        for option in texts:
            command = [tool("cuobjdump") or "cuobjdump", option, str(file)]
            environment = os.environ | {"PATH": path}
            texts[option] += subprocess.run(
                command, env=environment, check=True, capture_output=True, text=True, timeout=100
            ).stdout
    return texts


def images(folder: Path) -> dict[str, bytes]:
    """The machine code of all binaries, by the names that cuobjdump gives."""
    for i, binary in enumerate(fat_binaries()):
        file = folder / f"{i}.fatbin"
        file.write_bytes(binary)
        subprocess.run(
            [tool("cuobjdump") or "cuobjdump", "-xelf", "all", str(file)], cwd=folder, check=True, timeout=100
        )
    return {path.name: path.read_bytes() for path in folder.glob("*.cubin")}


def usages(text: str) -> dict[tuple[str, str], dict[str, int]]:
    """REG, STACK, SHARED, LOCAL and so on by kernel and architecture, of the text of `-res-usage`."""
    found: dict[tuple[str, str], dict[str, int]] = {}
    arch = kernel = ""
    for line in text.splitlines():
        if match := re.match(r"arch = (\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\w+):", line):
            kernel = match[1]
        elif kernel and "REG:" in line:
            found[kernel, arch] = {name: int(value) for name, value in re.findall(r"(\w+):(\d+)", line)}
    return found
