"""The JSON of manifests: written with a checksum, and read by a strict schema.

    {"format":2,"version":…,"step":…,"layout":"…","units":[{"name":…,"file":…,"digest":…,"tensors":[…]},…],"checksum":…}

The units of a checkpoint all have its version. If a unit has not changed since another checkpoint, its file may be that
checkpoint's: then the unit has `"origin"`, and the format is 3. The units of a save may have older versions, and a unit
may have several. Members may save a unit together, each in a file of its own. Then the units have `"version"` or
`"part":[start,end,of]`, and the format is 5.

Shards of islands have `"extents":{tensor:[full,offset,shape]}`: for each divided tensor the shape of the complete one,
the index of the part's first element, and the part's shape. Then the format is 6.

The checksum is the xxh3-64 of the text without it. It covers every field, including the version.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any, NoReturn

import numpy as np

from evermoe._native import digest
from evermoe.state.unit import complete_name
from evermoe.state.version import step_of

PLAIN_FORMAT, SHARING_FORMAT, VERSIONS_FORMAT, SHARDS_FORMAT = 2, 3, 5, 6
"""Numbers of the format: of units as of one checkpoint, with files of others, with versions or parts of units, and with
shards."""
_END = re.compile(r',"checksum":"([0-9a-f]{16})"}$')
_DIGEST = re.compile(r"^[0-9a-f]{16}\Z")


def to_text(version: int, layout: str, units: list[dict[str, Any]]) -> str:
    """Return the text of a manifest.

    Raises:
        ValueError: `from_text` would refuse it.
    """
    content = {"format": _format(units), "version": version, "step": step_of(version), "layout": layout, "units": units}
    if problem := _problem(content):
        raise ValueError(problem)
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return f'{text[:-1]},"checksum":"{_checksum(text)}"}}'


def from_text(content: bytes) -> dict[str, Any]:
    """Return the fields of a manifest's text.

    Raises:
        ValueError: the text is damaged, or no writer of this format has written it.
        RecursionError: as ValueError.
    """
    text = content.decode()
    try:
        fields = json.loads(text, object_pairs_hook=_named_once, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        raise ValueError(f"the text is no JSON: {error}") from None
    formats = PLAIN_FORMAT, SHARING_FORMAT, VERSIONS_FORMAT, SHARDS_FORMAT
    found = fields.get("format") if isinstance(fields, dict) else None
    if type(found) is not int or found not in formats:
        raise ValueError(f"format {str(found)[:80]}, expected one of {', '.join(map(str, formats))}")
    end = _END.search(text)
    if end is None or end[1] != _checksum(f"{text[: end.start()]}}}"):
        raise ValueError("the manifest's text does not match its checksum")
    del fields["checksum"]
    if problem := _problem(fields):
        raise ValueError(problem)
    return fields


def _checksum(text: str) -> str:
    return f"{digest(np.frombuffer(text.encode(), np.uint8)):016x}"


def _named_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError(f"one of the fields {list(fields)[:8]} occurs twice")
    return fields


def _refuse(number: str) -> NoReturn:
    raise ValueError(f"expected a number, got {number}")


def _format(units: list[dict[str, Any]]) -> int:
    if any("extents" in unit for unit in units):
        return SHARDS_FORMAT
    if any("version" in unit or "part" in unit for unit in units):
        return VERSIONS_FORMAT
    return SHARING_FORMAT if any("origin" in unit for unit in units) else PLAIN_FORMAT


# ---- schema


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 64


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_file_name(value: object) -> bool:
    """Return whether a path has a single component, so that it cannot leave its folder."""
    return isinstance(value, str) and value not in ("", ".", "..") and "/" not in value and "\0" not in value


def _is_digest(value: object) -> bool:
    return isinstance(value, str) and _DIGEST.match(value) is not None


def _is_part(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 3 or not all(map(_is_count, value)):
        return False
    return bool(value[0] < value[1] <= value[2])


def _are_tensors(value: object) -> bool:
    if not isinstance(value, list) or not all(map(_is_text, value)):
        return False
    return 0 < len(value) == len({*value})


def _are_extents(value: object) -> bool:
    return isinstance(value, dict) and bool(value) and all(map(_is_extent, value.values()))


def _is_extent(value: object) -> bool:
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(each, list) for each in value):
        return False
    if not all(_is_count(number) for each in value for number in each) or len({*map(len, value)}) > 1:
        return False
    return bool(value[0]) and all(n and start + n <= full for full, start, n in zip(*value, strict=True))


_Checks = dict[str, tuple[Callable[[object], bool], str]]
_MANIFEST: _Checks = {
    "format": (_is_count, "a number"),
    "version": (_is_count, "a version"),
    "step": (_is_count, "a number of steps"),
    "layout": (_is_text, "a text"),
    "units": (lambda value: isinstance(value, list) and bool(value), "one or more units"),
}
_UNIT: _Checks = {
    "name": (_is_text, "a text"),
    "file": (_is_file_name, "the name of a file in the folder of its checkpoint"),
    "digest": (_is_digest, "16 hexadecimal digits"),
    "tensors": (_are_tensors, "one or more tensors, each named once"),
    "origin": (_is_file_name, "the name of a checkpoint in the same folder"),
    "version": (_is_count, "a version"),
    "part": (_is_part, "a range of its bytes"),
    "extents": (_are_extents, "by tensor, the shape of the complete one, and offset and shape of a part of it"),
}
_OPTIONAL = {"origin", "version", "part", "extents"}


def _problem(fields: dict[str, Any]) -> str:
    """Return the defect of a manifest's fields; empty if there is none."""
    if problem := _defect("the manifest", fields, _MANIFEST, ()):
        return problem
    version, step = fields["version"], fields["step"]
    if step != step_of(version):
        return f"version {version} has taken {step_of(version)} steps, not {step}"
    rows: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for unit in fields["units"]:
        if problem := _defect("a unit", unit, _UNIT, _OPTIONAL):
            return problem
        if "extents" in unit and (problem := _no_shard(unit)):
            return problem
        rows.setdefault((unit["name"], unit.get("version", version)), []).append(unit)
    if fields["format"] != _format(fields["units"]):
        return f"format {fields['format']}, but that of its units is {_format(fields['units'])}"
    return next(filter(None, (_mismatch(*key, found) for key, found in rows.items())), "")


def _defect(what: str, fields: object, checks: _Checks, optional: Collection[str]) -> str:
    if not isinstance(fields, dict) or not checks.keys() - optional <= fields.keys() <= checks.keys():
        return f"{what}: expected an object with {', '.join(checks.keys() - optional)}, got {str(fields)[:80]}"
    wrong = next((name for name, value in fields.items() if not checks[name][0](value)), None)
    if wrong is None:
        return ""
    return (
        f"{what} {str(fields.get('name', ''))[:80]!r}: {wrong}: expected {checks[wrong][1]}, got {fields[wrong]!r:.80}"
    )


def _no_shard(unit: dict[str, Any]) -> str:
    """Return why a unit with extents is no shard; empty if it is one."""
    name = unit["name"]
    if complete_name(name) != name and "part" not in unit and unit["extents"].keys() <= {*unit["tensors"]}:
        return ""
    return f"unit {name!r:.80}: expected a complete shard, NAME@POSITIONofSIZE, with the tensors that have extents"


def _mismatch(name: str, version: int, rows: list[dict[str, Any]]) -> str:
    """Return how the rows of a version of a unit contradict each other; empty if they do not."""
    parts = sorted(row["part"] for row in rows if "part" in row)
    if len(rows) > 1 and len(parts) < len(rows):
        return f"unit {name!r} of version {version} occurs twice"
    if any(start != end for (start, *_), end in zip(parts, (0, *(end for _, end, _ in parts)), strict=False)) or (
        {of for *_, of in parts} != {end for _, end, _ in parts[-1:]}
    ):
        return f"unit {name!r} of version {version}: expected parts that make up all its bytes, got {parts[:8]}"
    if len({(row["digest"], *row["tensors"]) for row in rows}) > 1:
        return f"unit {name!r} of version {version}: its parts have different digests or tensors"
    return ""
