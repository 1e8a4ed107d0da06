"""Members that persist a few small units in one store, and what is found in it."""

from pathlib import Path

import torch

from evermoe._native import digest
from evermoe.checkpoint.folder import read_persisted
from evermoe.checkpoint.manifest import Part
from evermoe.checkpoint.partial_store import open_partial
from evermoe.checkpoint.persister import Persister
from evermoe.state.unit import TensorSpec, Unit
from support.harness import PATIENCE

PIECES = (TensorSpec("weight", (3, 5), torch.float32), TensorSpec("weight/exp_avg", (15,), torch.bfloat16))
UNITS = [Unit(name, PIECES, "moe", expert) for expert, name in enumerate("abc")] + [Unit(name, PIECES) for name in "xy"]
NBYTES = UNITS[0].nbytes


def content(unit, version):
    """The bytes of a unit at a version."""
    drawn = torch.Generator().manual_seed(ord(unit) * 1000 + version)
    return torch.randint(0, 256, (NBYTES,), dtype=torch.uint8, generator=drawn)


class Member:
    """A persister, and what it has told."""

    def __init__(self, where, name="m", layout="L"):
        self.durable, self.skipped = [], []
        self.persister = Persister(
            open_partial(where, layout),
            name,
            units=UNITS,
            on_durable=lambda version, units: self.durable.append((version, units)),
            on_skipped=lambda version, units: self.skipped.append((version, units)),
        )

    def snapshot(self, version, units, parts=None, members=()):
        """`parts`: start and end of those that are saved in part."""
        parts = {unit: Part(start, end, NBYTES) for unit, (start, end) in (parts or {}).items()}
        views = self.persister.begin_snapshot(version, dict.fromkeys(units, Part.all_of(NBYTES)) | parts, members)
        for unit, view in views.items():
            start = parts[unit].start if unit in parts else 0
            view.copy_(content(unit, version)[start : start + len(view)])
        self.persister.commit({unit: digest(content(unit, version).numpy()) for unit in parts})

    def persist(self, version, units, parts=None, members=()):
        self.snapshot(version, units, parts, members)
        self.persister.flush(PATIENCE)


def versions(where, layout="L"):
    """Unit → its versions, newest first; all of them are read."""
    found = {}
    for each in open_partial(where, layout).find_units():
        assert torch.equal(read_persisted(each), content(each.unit, each.version))
        found.setdefault(each.unit, []).append(each.version)
    return found


def parts(where):
    """Return the names of all stored parts of versions, except marks of versions that were given up."""
    if isinstance(where, Path):
        return sorted(path.name for path in where.iterdir())
    found = [key for key, nbytes, _ in where.place.below(where.key) if nbytes or not key.endswith(".json")]
    names = {each for key in found for each in key.split("/") if each.startswith("persisted-")}
    return sorted({name.removesuffix(".json").removesuffix(".begun") for name in names})
