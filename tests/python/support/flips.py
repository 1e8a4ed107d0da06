"""Flips single bits: in the copies that this process keeps for others, in what it trains, in files."""

from __future__ import annotations

import itertools
import re
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import evermoe
from evermoe._native import RECORD_HEADER_BYTES, digest
from evermoe.state.unit import expert_unit

BIT = 0x10
NEEDLE_BYTES = 64
CHUNK_BYTES = 1 << 20


class Flipper:
    """Flips bits in the copies of a session, wherever they have their bytes.

    `where`: of replicas "state": the state itself; "log": the newest gradient that waits in the log; "step": the state,
    as a step that was repeated wrongly leaves it: what the replica knows of its own bytes knows no better. "arena": the
    newest snapshots that came from others. "active": the experts that are trained here. Of what all members hold:
    "dense" is a weight, "moment" what the optimizer keeps of it, "gradient" what is summed.
    """

    def __init__(self, session: evermoe.Session) -> None:
        self._session = session
        self._payloads: dict[str, bytes] = {}
        """Per unit, how the newest gradient begins that came here."""

    def watch(self) -> None:
        """Remembers gradients that arrive from now on."""
        replica = self._replica
        hold, names = (
            replica.hold_all,
            {digest(np.frombuffer(part.name.encode(), np.uint8)): part.unit.name for part in replica._parts},
        )

        def watched(messages: Any, sizes: list[int]) -> Any:
            for end, size in zip(itertools.accumulate(sizes), sizes, strict=True):
                self._note(bytes(messages[end - size : end]), names)
            return hold(messages, sizes)

        replica.hold_all = watched  # type: ignore[method-assign]

    def _note(self, record: bytes, names: dict[int, str]) -> None:
        payload = record[RECORD_HEADER_BYTES : RECORD_HEADER_BYTES + NEEDLE_BYTES]
        if record[5] == 0 and len(payload) == NEEDLE_BYTES:
            self._payloads[names[int.from_bytes(record[8:16], "little")]] = payload

    @property
    def _replica(self) -> Any:
        replicas = self._session._protection.replicas._now
        assert replicas is not None
        return replicas.copies.replica

    def flip(self, where: str) -> list[str]:
        """Flips one bit of each unit that is kept here; the units."""
        if where == "arena":
            return self._flip_arenas()
        if where == "active":
            return self._flip_trained()
        if where in ("dense", "moment", "gradient"):
            return [self._flip_dense(where)]
        if where == "log":
            return [unit for unit, payload in self._payloads.items() if flip_in_memory(payload)]
        units = []
        for part in self._replica._parts:
            with part.lock:
                if part.state is None:
                    continue
                part.state[part.layout.specs[0].nbytes // 8 * 4 + 2] ^= BIT  # a weight: it remembers
                if where == "step":
                    part.seal_state()
            units.append(part.unit.name)
        return units

    def behind(self) -> list[str]:
        """Units that are kept here, and that have steps to repeat."""
        log = self._replica._log
        parts = enumerate(self._replica._parts)
        return sorted({part.unit.name for index, part in parts if log.version(index) != log.newest(index)})

    def _flip_arenas(self) -> list[str]:
        units = []
        for kept in self._session._store.peers:
            (index, _), *_ = kept.arena.versions()
            for name, offset, nbytes in kept.arena.units():
                kept.arena.buffer(index)[offset + nbytes // 2] ^= BIT
                units.append(name)
        return units

    def _flip_trained(self) -> list[str]:
        layers = self._session._state.layers
        for layer in layers.values():
            layer.weights.data.view(torch.uint8)[:, 2] ^= BIT
        return [expert_unit(path, expert) for path, layer in layers.items() for expert in layer.ids]

    def _flip_dense(self, where: str) -> str:
        state = self._session._state
        name, (parameter, *_) = next((n, list(ts.values())) for n, ts in state._dense.items() if n == "head")
        tensor = {
            "dense": lambda: parameter.data,
            "moment": lambda: state.optimizer.state[parameter]["exp_avg"],
            "gradient": lambda: parameter.grad,
        }[where]()
        tensor.view(-1).view(torch.uint8)[2] ^= BIT
        return name


def flip_file(path: Path) -> None:
    """Flips bits all over the tensors of a file of safetensors, and none of its header."""
    data = bytearray(path.read_bytes())
    for place in range(8 + int.from_bytes(data[:8], "little"), len(data), 16):
        data[place] ^= BIT
    path.write_bytes(data)


def flip_in_memory(needle: bytes) -> int:
    """Flips a bit of each place where this process has these bytes in memory of its own; how many there were.

    Other threads may give memory back meanwhile: it is read and written as a file, which then fails and harms nobody.
    """
    found = 0
    maps = Path("/proc/self/maps").read_text().splitlines()
    places = [re.match(r"([0-9a-f]+)-([0-9a-f]+) rw-p [0-9a-f]+ 00:00 0\s*(\[heap\])?$", line) for line in maps]
    held = id(needle) + bytes.__basicsize__ - 1
    buffer = np.empty(CHUNK_BYTES + NEEDLE_BYTES, np.uint8)
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        for start, end in ((int(place[1], 16), int(place[2], 16)) for place in places if place):
            chunks = range(start, end, CHUNK_BYTES)
            for address in (at for chunk in chunks for at in _find(memory, chunk, end, needle, buffer)):
                if address != held and not 0 <= address - buffer.ctypes.data < buffer.nbytes:
                    with suppress(OSError):
                        memory.seek(address)
                        memory.write(bytes([needle[0] ^ BIT]))
                        found += 1
    return found


def _find(memory: FileIO, start: int, end: int, needle: bytes, buffer: NDArray[np.uint8]) -> list[int]:
    """Where the bytes begin in a chunk of memory, aligned to words; nowhere if the chunk is gone."""
    read = 0
    with suppress(OSError):
        memory.seek(start)
        read = memory.readinto(buffer[: end - start].data) or 0
    words = buffer[: min(read, CHUNK_BYTES) // 8 * 8].view(np.uint64)
    first = np.frombuffer(needle[:8], np.uint64)[0]
    candidates = [8 * int(at) for at in np.flatnonzero(words == first)]
    return [start + at for at in candidates if buffer[at : at + len(needle)].data == needle[: read - at]]
