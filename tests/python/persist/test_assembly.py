"""Units assembled from the shards of a checkpoint, with the same bits or not at all; and commands on those."""

import itertools
import json
import re

import pytest
import torch
from torch.distributed import checkpoint as dcp

from evermoe import load_weights
from evermoe._native import digest
from evermoe.checkpoint import checkpoint
from evermoe.checkpoint.assembly import Wanted, complete_units, read_wanted
from evermoe.checkpoint.manifest import MANIFEST, Row, as_bytes, manifest_text, parsed, read_manifest
from evermoe.checkpoint.plain_files import write_tensors
from evermoe.errors import CorruptCopy
from evermoe.state.extent import Extent
from evermoe.state.unit import SESSION
from support.commands import evermoe
from support.models import digests, everyone, make

VERSION = 1 << 40 | 2
FULL = torch.arange(7 * 5 * 4.0).view(7, 5, 4)
STEPS = torch.tensor(3.0)


def cut(tensor, size, axes=(0,)):
    """Extents of a tensor's parts: along one axis for `size` positions, or along each of two."""
    lengths = [[each.shape[axis] for each in tensor.chunk(size, axis)] for axis in axes]
    found = []
    for places in itertools.product(range(size), repeat=len(axes)):
        offset, shape = [0] * tensor.dim(), list(tensor.shape)
        for axis, place, pieces in zip(axes, places, lengths, strict=True):
            offset[axis], shape[axis] = sum(pieces[:place]), pieces[place] if place < len(pieces) else 0
        found.append(Extent(tuple(tensor.shape), tuple(offset), tuple(shape)))
    return found


def part(tensor, extent):
    return tensor[tuple(slice(start, start + n) for start, n in zip(extent.offset, extent.shape, strict=True))]


def save(folder, units, layout="L"):
    """Write units, (tensors, extents) by name, as a checkpoint of their own files."""
    path = folder / "step-00000002"
    path.mkdir(parents=True)
    rows = []
    for number, (name, (tensors, extents)) in enumerate(units.items()):
        content = {f"{name}/{key}": tensor.contiguous() for key, tensor in tensors.items()}
        write_tensors(path / f"{number}.safetensors", content)
        value = digest(as_bytes(tensors).numpy())
        rows.append(Row(name, f"{number}.safetensors", value, list(tensors), extents=extents or None))
    (path / MANIFEST).write_text(manifest_text(VERSION, layout, rows))
    return path


def shards(size, axes=(0,), full=FULL):
    """A unit `a` of a tensor and a number, divided; positions without an element have none."""
    extents = cut(full, size, axes)
    return {
        f"a@{number}of{len(extents)}": ({"w": part(full, each), "w/step": STEPS}, {"w": each})
        for number, each in enumerate(extents)
        if all(each.shape)
    }


COMPLETE = {"a": ({"w": FULL, "w/step": STEPS}, {})}
DIVISIONS = {
    "none": COMPLETE,
    "2": shards(2),
    "3": shards(3),
    "5, of which one is empty": shards(5),
    "2 by columns": shards(2, (1,)),
    "2 x 2": shards(2, (0, 2)),
    "2, each twice": {
        f"a@{copy * 2 + number}of4": unit for copy in (0, 1) for number, unit in enumerate(shards(2).values())
    },
}


@pytest.mark.parametrize("saved", DIVISIONS)
@pytest.mark.parametrize("wanted", DIVISIONS)
def test_any_division_is_assembled_from_any_other(tmp_path, saved, wanted):
    manifest = read_manifest(save(tmp_path, DIVISIONS[saved]))
    asked = [
        Wanted(name, "a", {key: extents.get(key) for key in tensors})
        for name, (tensors, extents) in DIVISIONS[wanted].items()
    ]
    found = dict(read_wanted(manifest, asked))
    expected = {name: tensors for name, (tensors, _) in DIVISIONS[wanted].items()}
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_only_pieces_that_overlap_are_read(tmp_path):
    path = save(tmp_path, shards(7))
    for number in (0, 1, 2, 5, 6):
        (path / f"{number}.safetensors").unlink()
    extent = Extent((7, 5, 4), (3, 0, 0), (2, 5, 4))
    ((_, found),) = read_wanted(read_manifest(path), [Wanted("a@1of3", "a", {"w": extent, "w/step": None})])
    assert torch.equal(found["w"], FULL[3:5])


def damaged(path):
    file = path / "1.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def without(*names):
    return {name: unit for name, unit in shards(3).items() if name not in names}


OF_ANOTHER = {"a@1of3": ({"w": torch.zeros(3, 5, 3), "w/step": STEPS}, {"w": Extent((8, 5, 3), (3, 0, 0), (3, 5, 3))})}
OF_ANOTHER_TYPE = {"a@1of3": ({"w": torch.zeros(3, 5, 4).double(), "w/step": STEPS}, {"w": cut(FULL, 3)[1]})}
NOT_AS_SAID = {"a@1of3": ({"w": torch.zeros(2, 5, 4), "w/step": STEPS}, {"w": cut(FULL, 3)[1]})}


@pytest.mark.parametrize(
    ("units", "harm", "message"),
    [
        (shards(3), damaged, "a@1of3 in .*1.safetensors: expected digest"),
        (shards(3), lambda path: (path / "2.safetensors").unlink(), "2.safetensors cannot be read"),
        (without("a@1of3"), None, "lacks 60 of the 140 numbers of a/w: a shard of a is missing"),
        (without("a@0of3", "a@2of3"), None, "lacks 80 of the 140 numbers of a/w"),
        ({"b": COMPLETE["a"]}, None, "has no unit a"),
        (without("a@1of3") | OF_ANOTHER, None, r"a@1of3/w .* belongs to \[8, 5, 3\]; expected .* of \[7, 5, 4\]"),
        (without("a@1of3") | OF_ANOTHER_TYPE, None, "a/w in .* has pieces of"),
        (without("a@1of3") | NOT_AS_SAID, None, r"a@1of3/w .* has the shape \[2, 5, 4\]"),
    ],
)
def test_what_is_not_complete_is_refused(tmp_path, units, harm, message):
    path = save(tmp_path, units)
    if harm is not None:
        harm(path)
    wanted = [Wanted("a", "a", {"w": Extent.complete((7, 5, 4)), "w/step": None})]
    with pytest.raises(CorruptCopy, match=message):
        list(read_wanted(read_manifest(path), wanted))


def test_shards_of_several_versions_are_refused(tmp_path):
    rows = [
        Row(name, "0", 0, ["w", "w/step"], version=VERSION - number, extents=extents)
        for number, (name, (_, extents)) in enumerate(shards(2).items())
    ]
    manifest = parsed(tmp_path / "save-00000002", manifest_text(VERSION, "L", rows).encode())
    with pytest.raises(CorruptCopy, match="has shards of a of several versions"):
        list(read_wanted(manifest, complete_units(manifest)))


# ---- checkpoints of a model


def save_divided(folder, state, size=2):
    """A checkpoint of a state whose dense units are divided as islands divide parameters; buffers are not."""
    units = {}
    for unit in state.catalog.units:
        data = torch.empty(unit.nbytes, dtype=torch.uint8)
        state.read(unit.name, data)
        tensors = unit.tensors(data)
        is_state = unit.name == SESSION
        buffers = {spec.name for spec in unit.specs if spec.is_buffer or is_state}
        if unit.layer is not None or buffers == {*tensors}:
            units[unit.name] = tensors, {}
            continue
        for position in range(size):
            own, extents = {}, {}
            for key, tensor in tensors.items():
                if key not in buffers and tensor.dim():
                    extents[key] = cut(tensor, size)[position]
                    own[key] = part(tensor, extents[key])
                elif key not in buffers:
                    own[key] = tensor
            units[f"{unit.name}@{position}of{size}"] = own, extents
        if buffers:
            units[unit.name] = {key: tensors[key] for key in tensors if key in buffers}, {}
    return save(folder, units, state.catalog.layout)


@pytest.fixture
def trained(tmp_path):
    """A model after two steps, and its checkpoint as one island of two writes it."""
    model, optimizer, state = make("adamw-fused", steps=2)
    return model, optimizer, state, save_divided(tmp_path / "saved", state)


def test_a_state_is_read_and_weights_are_loaded(trained):
    model, _, state, path = trained
    manifest = read_manifest(path)
    assert {"norm", "norm@0of2", "norm@1of2"} <= manifest.units.keys()
    _, _, other = make("adamw-fused")
    other.adopt(everyone(other), checkpoint.read(manifest, other, [unit.name for unit in other.catalog.units]))
    assert digests(other) == digests(state)
    fresh, _, _ = make("adamw-fused")
    load_weights(fresh, path)
    torch.testing.assert_close(fresh.state_dict(), model.state_dict(), rtol=0, atol=0)


def test_another_model_is_refused(trained):
    _, _, _, path = trained
    _, _, other = make("sgd")
    with pytest.raises(CorruptCopy, match="belongs to another model"):
        checkpoint.read(read_manifest(path), other, [unit.name for unit in other.catalog.units])


def test_commands(trained, tmp_path):
    model, optimizer, _, path = trained
    shown = evermoe("checkpoints", "show", "--json", str(path), folder=tmp_path)
    extents = json.loads(shown.stdout)["units"]["embedding@1of2"]["extents"]
    assert extents["weight"] == extents["weight/exp_avg"] == [[12, 8], [6, 0], [6, 8]]
    assert "1 complete" in evermoe("checkpoints", "list", str(path.parent), folder=tmp_path).stdout
    copied = tmp_path / "copies" / path.name
    assert evermoe("checkpoints", "copy", str(path), str(tmp_path / "copies"), folder=tmp_path).returncode == 0
    for each in (path, copied):
        done = evermoe("checkpoints", "verify", str(each), folder=tmp_path)
        assert done.returncode == 0 and re.search(r"\d+ units are complete", done.stdout), done.stdout
        out = tmp_path / f"{each.parent.name}.dcp"
        assert evermoe("export", "--to", "dcp", str(each), str(out), folder=tmp_path).returncode == 0
        found = {
            "embedding/weight": torch.zeros(12, 8),
            "embedding/weight/exp_avg": torch.zeros(12, 8),
            "norm/running_mean": torch.zeros(8),
        }
        dcp.load(found, checkpoint_id=out, no_dist=True)
        weight = model.embedding.weight
        expected = [weight.detach(), optimizer.state[weight]["exp_avg"], model.norm.running_mean]
        torch.testing.assert_close([*found.values()], expected, rtol=0, atol=0)
        assert not [key for key in dcp.FileSystemReader(out).read_metadata().state_dict_metadata if "@" in key]
    damaged(path)
    done = evermoe("checkpoints", "verify", str(path), folder=tmp_path)
    assert done.returncode == 1 and "damaged" in done.stdout
