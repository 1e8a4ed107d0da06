"""Batches of any structure, divided among members by their samples.

A batch has fields with one row per sample each, or is a list with one entry per sample. Tensors and arrays have samples
along their first dimension. Mappings, named tuples and dataclasses have fields. A list or tuple may be either: torch's
`default_collate` makes `[x, y]` of pairs, and `collate_fn=list` makes a list of samples.

So `read` first finds all readings in which the numbers of samples agree. The size of a batch and the reading of earlier
batches then choose among them. If two are left, it refuses the batch: each would train without an error.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

Way = Literal["fields", "samples"]
"""Reading of a list."""
Lists = Mapping[str, Way]
"""Readings of lists and tuples, by their path in the batch."""

MAX_READINGS = 8
"""Maximum number of readings of one part of a batch that are compared."""
MAX_DESCRIBED = 6
"""Maximum number of parts of a batch that a message names."""


@dataclass(frozen=True)
class Reading:
    """One way to divide a batch, or a part of one."""

    length: int | None
    """Number of samples; None for a part that all of them share, such as a number."""
    fields: Mapping[Any, Reading] | None = None
    """Reading of each field; None for a part that has one row or entry per sample."""
    lists: Lists = field(default_factory=dict)

    def cut(self, value: Any, place: slice) -> Any:
        """Return these samples of a batch, or of a part that `cut` has returned; keeps the classes of containers."""
        if self.length is None:
            return value
        if self.fields is None:
            return _rows(value, place)
        children = _fields(value)
        assert children is not None
        parts = {key: reading.cut(children[key], place) for key, reading in self.fields.items()}
        return _rebuilt(value, parts, place)


def read(value: Any, *, size: int | None = None, known: Lists | None = None, has_fields: bool = False) -> Reading:
    """Return the only possible reading of a batch; its length is None if no part of it belongs to a sample.

    Args:
        value: the batch.
        size: usual number of samples of a batch; the last one of an epoch may have fewer. None if unknown.
        known: readings of lists in earlier batches.
        has_fields: whether lists with tensors always have fields, as those of torch's `default_collate`.

    Raises:
        ValueError: the batch has no reading, or more than one.
    """
    found = _readings(value, "", known or {}, has_fields)
    found = [each for each in found if each.length is not None] or found
    if size is not None:
        found = [each for each in found if each.length == size] or [
            each for each in found if each.length is None or each.length < size
        ]
    if len(found) > 1 and _has_mappings(value):
        found = [each for each in found if each.fields is None]
    if len(found) == 1 and found[0].length != 0:
        return found[0]
    raise ValueError(_refusal(value, found, size, known or {}))


def read_collated(value: Any, size: int) -> Reading:
    """Return the reading of a batch of `size` samples that torch's `default_collate` has made.

    Its lists have fields, except for those of strings.
    """
    return read(value, size=size, known=dict(_lists_of_collated(value, "")))


def _lists_of_collated(value: Any, path: str) -> Iterator[tuple[str, Way]]:
    children = _fields(value) or {}
    if _is_list(value):
        yield path, "samples" if all(isinstance(each, str | bytes) for each in value) else "fields"
    for key, child in children.items():
        yield from _lists_of_collated(child, f"{path}.{key}".strip("."))


def _refusal(value: Any, found: Sequence[Reading], size: int | None, known: Lists) -> str:
    described = describe(value)
    if len(found) > 1:
        ways = " or ".join(dict.fromkeys(_way(value, each) for each in found[:2]))
        return (
            f"{described} may be read as {ways}. Give the number of samples of a global batch, "
            "ElasticLoader(loader, batch_size=n), if the readings differ in it; else yield a dict of the fields, or a "
            "list with a dict for each sample"
        )
    usual = f" of at most {size} samples" if size is not None else ""
    before = f"; earlier batches had {_listed(known)}" if known else ""
    return (
        f"expected a batch{usual}: tensors and arrays with one row for each sample, lists with one entry for each, all "
        f"of the same number, alone or in mappings, sequences, named tuples and dataclasses; got {described}{before}"
    )


def _listed(known: Lists) -> str:
    return ", ".join(
        f"{reading} in the list {'at ' + path if path else 'at the top'}" for path, reading in known.items()
    )


def _way(value: Any, reading: Reading) -> str:
    if reading.fields is None:
        return f"{reading.length} samples, one for each entry"
    return f"a batch of {reading.length} samples, with {_listed(reading.lists)}"


# ---- readings


def _readings(value: Any, path: str, known: Lists, has_fields: bool) -> list[Reading]:
    """Return all readings of a part of a batch; none if it cannot be divided."""
    if _is_same_for_all(value):
        return [Reading(None)]
    if isinstance(value, Tensor | np.ndarray):
        return [Reading(int(value.shape[0]) if isinstance(value, np.ndarray) else int(value.size(0)))]
    if isinstance(value, PackedSequence):
        return [Reading(int(value.batch_sizes[0]))]
    children = _fields(value)
    if children is None:
        return []
    if not _is_list(value):
        return _of_fields(children, path, known, has_fields)
    found = []
    if known.get(path) != "samples":
        found = [
            dataclasses.replace(each, lists={path: "fields", **each.lists})
            for each in _of_fields(children, path, known, has_fields)
            if each.length is not None or isinstance(value, tuple)
        ]
    if known.get(path) != "fields" and _has_samples(value, has_fields):
        found.append(Reading(len(value), None, {path: "samples"}))
    return found


def _of_fields(children: Mapping[Any, Any], path: str, known: Lists, has_fields: bool) -> list[Reading]:
    """Return the readings in which all children have the same number of samples, or are shared by all samples."""
    each = {key: _readings(child, f"{path}.{key}".strip("."), known, has_fields) for key, child in children.items()}
    lengths = dict.fromkeys(reading.length for found in each.values() for reading in found)
    if not all(each.values()):
        return []
    if not any(length is not None for length in lengths):
        return [Reading(None)]
    readings = []
    for length in (length for length in lengths if length is not None):
        fitting = [_fitting(found, length) for found in each.values()]
        for chosen in itertools.islice(itertools.product(*fitting), MAX_READINGS):
            lists = {path: way for one in chosen for path, way in one.lists.items()}
            readings.append(Reading(length, dict(zip(each, chosen, strict=True)), lists))
    return readings[:MAX_READINGS]


def _fitting(found: Sequence[Reading], length: int) -> list[Reading]:
    """Return the readings with this number of samples; else those of a part that all samples share."""
    return [each for each in found if each.length == length] or [each for each in found if each.length is None]


def _has_samples(items: Sequence[Any], has_fields: bool) -> bool:
    """Return whether the entries may be samples: all of one kind, or without tensors."""
    if not any(map(_has_tensors, items)):
        return True
    kinds = {_kind(item) for item in items if item is not None}
    return len(kinds) == 1 and not has_fields


def _kind(item: Any) -> Any:
    """Return the kind of an item, which all samples of a list share."""
    if isinstance(item, Tensor | np.ndarray):
        return Tensor if isinstance(item, Tensor) else np.ndarray, item.dtype, item.ndim
    if isinstance(item, Mapping):
        return type(item), frozenset(item)
    return type(item), len(item) if isinstance(item, tuple) else None


def _has_tensors(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return True
    children = _fields(value)
    return children is not None and any(map(_has_tensors, children.values()))


def _has_mappings(value: Any) -> bool:
    return _is_list(value) and all(isinstance(item, Mapping) for item in value)


# ---- parts of a batch


def _is_same_for_all(value: Any) -> bool:
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim == 0
    return value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic)


def _is_list(value: Any) -> bool:
    """Return whether a value is a sequence whose entries may be fields or samples."""
    is_named = isinstance(value, tuple) and hasattr(value, "_fields")
    return isinstance(value, Sequence) and not isinstance(value, str | bytes) and not is_named


def _fields(value: Any) -> dict[Any, Any] | None:
    """Return the parts of a container by key; None for anything else."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    return dict(enumerate(value)) if _is_list(value) else None


def _rows(value: Any, place: slice) -> Any:
    """Return rows or entries of a value that has one per sample."""
    if isinstance(value, PackedSequence):
        return pack_sequence(unpack_sequence(value)[place], enforce_sorted=value.sorted_indices is None)
    if isinstance(value, Tensor) and value.is_nested:
        return torch.nested.as_nested_tensor(list(value.unbind())[place], layout=value.layout)
    if isinstance(value, Tensor | np.ndarray | list | tuple):
        return value[place]
    return _as_type_of(value, itertools.islice(value, place.start, place.stop))


def _as_type_of(value: Any, items: Iterable[Any]) -> Any:
    found = list(items)
    try:
        return type(value)(found)
    except TypeError:
        return tuple(found) if isinstance(value, tuple) else found


def _rebuilt(value: Any, parts: dict[Any, Any], place: slice) -> Any:
    """Return a container of the same class with other parts."""
    if isinstance(value, MutableMapping):
        found = copy.copy(value)
        found.update(parts)
        if isinstance(encodings := getattr(value, "_encodings", None), list):  # of a BatchEncoding, one per sample
            found._encodings = encodings[place]  # type: ignore[attr-defined]
        return found
    if isinstance(value, Mapping):
        try:
            return type(value)(parts)  # type: ignore[call-arg]
        except TypeError:
            return parts
    if isinstance(value, tuple) and hasattr(value, "_make"):
        return value._make(parts.values())
    if dataclasses.is_dataclass(value):
        same_class = copy.copy(value)
        for name, part in parts.items():
            object.__setattr__(same_class, name, part)  # the dataclass may be frozen
        return same_class
    return _as_type_of(value, parts.values())


def describe(value: Any) -> str:
    """Return a description of a batch for a message: classes and shapes."""
    if isinstance(value, Tensor | np.ndarray):
        return f"{type(value).__name__} {[*value.shape] if not getattr(value, 'is_nested', False) else 'nested'}"
    children = None if isinstance(value, PackedSequence) else _fields(value)
    if children is None:
        return repr(value)[:20] if _is_same_for_all(value) else type(value).__name__
    named = [
        describe(child) if _is_list(value) else f"{key}: {describe(child)}"
        for key, child in itertools.islice(children.items(), MAX_DESCRIBED)
    ]
    more = [f"{len(children) - MAX_DESCRIBED} more"] if len(children) > MAX_DESCRIBED else []
    return f"{type(value).__name__}({', '.join(named + more)})"
