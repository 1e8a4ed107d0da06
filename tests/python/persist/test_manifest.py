"""Manifests: what is written is read again, and what no writer of this format writes is refused."""

import json
from pathlib import Path

import pytest

from evermoe.checkpoint.manifest import Part, Row, manifest_text, parsed
from evermoe.checkpoint.manifest_json import _checksum
from evermoe.errors import CorruptCopy
from evermoe.state.extent import Extent

PATH = Path("run/step-00000007")
VERSION = 3 << 40 | 7
NAMES = ["weight", "weight/exp_avg"]
SHARD = Row("head@1of2", "units-1.safetensors", 8, NAMES, extents={"weight": Extent((5, 4), (3, 0), (2, 4))})
ROWS = [
    Row("dense", "units-0.safetensors", 0x0123_4567_89AB_CDEF, NAMES),
    Row("moe.experts.\u00fc/0", "units-0.safetensors", 7, NAMES),
]


def text(rows=ROWS):
    return manifest_text(VERSION, "L", rows)


def read(content):
    return parsed(PATH, content.encode() if isinstance(content, str) else content)


def complete(row, version=VERSION, origin=PATH.name):
    """The row as it is read."""
    return row._replace(version=row.version or version, origin=row.origin or origin)


def sealed(start, end):
    """The text with a field changed and the checksum computed again, as a writer with other rules produces it."""
    body = text()[: -len(',"checksum":"0123456789abcdef"}')] + "}"
    assert start in body
    body = body.replace(start, end, 1)
    return f'{body[:-1]},"checksum":"{_checksum(body)}"}}'


@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (ROWS, 2),
        ([ROWS[0], ROWS[1]._replace(origin="step-00000003.0000000002-7f01")], 3),
        ([*ROWS, ROWS[1]._replace(version=2 << 40 | 5, origin="save-00000005")], 5),
        ([ROWS[0], *(ROWS[1]._replace(part=Part(*part)) for part in ((64, 100, 100), (0, 64, 100)))], 5),
        ([ROWS[0], SHARD, ROWS[1]._replace(version=2 << 40 | 5, origin="save-00000005")], 6),
    ],
    ids=["units of one version", "files of other checkpoints", "several versions", "parts", "shards"],
)
def test_a_manifest_is_read_as_it_was_written(rows, kind):
    written = text(rows)
    assert json.loads(written)["format"] == kind
    found = read(written)
    assert (found.version, found.layout, found.path) == (VERSION, "L", PATH)
    assert list(found.rows) == [complete(row) for row in rows]


def test_the_newest_version_of_a_unit_comes_first_and_parts_in_their_order():
    parts = [ROWS[0]._replace(file=f"parts-{part[0]}", part=Part(*part)) for part in ((64, 100, 100), (0, 64, 100))]
    older = [ROWS[1]._replace(version=version, file=str(version), origin="save-1") for version in (4, 6)]
    found = read(text([*older[:1], *parts, ROWS[1], *older[1:]]))
    assert [(each.unit, each.version) for each in found.saved] == [
        *((ROWS[1].unit, version) for version in (VERSION, 6, 4)),
        ("dense", VERSION),
    ]
    assert found.units["dense"].files == [PATH / "parts-0", PATH / "parts-64"]
    assert found.units[ROWS[1].unit].files == [PATH / "units-0.safetensors"]
    assert found.saved[1].files == [PATH.parent / "save-1" / "6"]
    assert ("save-1", "4") in found.files


def test_a_changed_byte_is_found():
    written = text().encode()
    for at in range(len(written)):
        for bit in range(8):
            damaged = bytearray(written)
            damaged[at] ^= 1 << bit
            with pytest.raises(CorruptCopy):
                read(bytes(damaged))


def test_every_cut_is_found():
    written = text().encode()
    for end in range(len(written)):
        with pytest.raises(CorruptCopy):
            read(written[:end])


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        ('"format":2', '"format":4', "format 4, expected one of 2, 3, 5"),
        ('"format":2', '"format":3', "format 3, but that of its units is 2"),
        ('"format":2', '"format":2.0', "format 2.0, expected one of 2, 3, 5"),
        ('"format":2,', "", "format None, expected"),
        ('"step":7', '"step":7,"extra":1', "expected an object with"),
        ('"step":7', '"step":7,"step":7', "occurs twice"),
        ('"step":7', '"step":8', "has taken 7 steps, not 8"),
        ('"step":7', '"step":-7', "step: expected a number of steps, got -7"),
        ('"step":7', '"step":7.5', "step: expected a number of steps, got 7.5"),
        ('"step":7', '"step":true', "step: expected a number of steps, got True"),
        ('"step":7', '"step":18446744073709551616', "step: expected a number of steps"),
        ('"step":7', '"step":Infinity', "expected a number, got Infinity"),
        ("units-0.safetensors", "/etc/passwd", "file: expected the name of a file in the folder of its checkpoint"),
        ("units-0.safetensors", "..", "file: expected the name of a file"),
        ("units-0.safetensors", "../step-1/units-0.safetensors", "file: expected the name of a file"),
        ("units-0.safetensors", "", "file: expected the name of a file"),
        ('"file":"units-0.safetensors"', '"file":7', "file: expected the name of a file"),
        ('"digest":', '"origin":"..","digest":', "origin: expected the name of a checkpoint in the same folder"),
        ("0123456789abcdef", "0123456789ABCDEF", "digest: expected 16 hexadecimal digits"),
        ("0123456789abcdef", "+123456789abcdef", "digest: expected 16 hexadecimal digits"),
        ('"name":"dense"', '"name":"moe.experts.\u00fc/0"', "occurs twice"),
        ('["weight","weight/exp_avg"]', "[]", "tensors: expected one or more tensors"),
        ('"weight/exp_avg"', '"weight"', "tensors: expected one or more tensors, each named once"),
        ('"tensors":', '"part":[0,64,100],"tensors":', "that of its units is 5"),
        ('{"name":"dense"', '[{"name":"dense"', "no JSON"),
    ],
)
def test_what_no_writer_of_this_format_writes_is_named(start, end, message):
    with pytest.raises(
        CorruptCopy, match=r"step-00000007/manifest.json is not a manifest of a checkpoint: "
    ) as refused:
        read(sealed(start, end))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "7", "null", '{"units":[]}', "[" * 100_000, '{"format":' + "[" * 100_000]
)
def test_other_texts_are_refused(content):
    with pytest.raises(CorruptCopy):
        read(content)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "one or more units"),
        ([ROWS[0], ROWS[0]], "occurs twice"),
        ([ROWS[0]._replace(file="a/b")], "the name of a file"),
        ([ROWS[0]._replace(part=Part(64, 64, 100))], "a range of its bytes"),
        ([ROWS[0]._replace(part=Part(0, 101, 100))], "a range of its bytes"),
        ([ROWS[0]._replace(part=Part(0, 64, 100))], "parts that make up all its bytes"),
        ([ROWS[0]._replace(part=Part(*part)) for part in ((0, 64, 100), (65, 100, 100))], "parts that make up all"),
        ([ROWS[0]._replace(part=Part(*part)) for part in ((0, 64, 100), (64, 101, 101))], "parts that make up all"),
        ([ROWS[0]._replace(part=Part(0, 64, 100)), ROWS[0]], "occurs twice"),
        ([SHARD._replace(unit="head")], "expected a complete shard, NAME@POSITIONofSIZE"),
        ([SHARD._replace(unit="@1of2")], "expected a complete shard"),
        ([SHARD._replace(part=Part(0, 100, 100))], "expected a complete shard"),
        ([SHARD._replace(tensors=["bias"])], "expected a complete shard"),
        *(
            ([SHARD._replace(extents=extents)], "extents: expected by tensor, the shape of the complete one")
            for extents in (
                {},
                {"weight": ((5, 4), (4, 0), (2, 4))},
                {"weight": ((5, 4), (3, 0), (2, 0))},
                {"weight": ((5, 4), (3,), (2, 4))},
                {"weight": ((5, 4), (-1, 0), (2, 4))},
                {"weight": ((), (), ())},
                {"weight": ((5, 4), (3, 0))},
            )
        ),
        (
            [ROWS[0]._replace(part=Part(0, 64, 100)), ROWS[0]._replace(part=Part(64, 100, 100), digest=8)],
            "its parts have different digests or tensors",
        ),
    ],
)
def test_rows_that_contradict_each_other_are_not_written(rows, message):
    with pytest.raises(ValueError, match=message):
        text(rows)
