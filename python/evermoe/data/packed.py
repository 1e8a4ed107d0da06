"""Documents packed into sequences, with an exact state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from evermoe.data.stateful import END, Stateful
from evermoe.options import checked

IGNORED = -100
"""Label of a token that counts in no loss, as of `torch.nn.functional.cross_entropy`."""


class _Document(NamedTuple):
    tokens: np.ndarray
    """int64."""
    labels: np.ndarray
    """int64, of the same length."""


class Packed(Stateful):
    """Documents of any length, packed into sequences of tokens.

    Yields a dict of int64 tensors `[length]`, as `transformers.DataCollatorWithFlattening` does:

    - `input_ids`: the tokens;
    - `labels`: those of the documents, or their tokens; -100 for the first token of each document or part of one, so
      that none is predicted from another document, and for padding. Models shift them;
    - `position_ids`: the place of a token in its document, or its part of one: 0 begins another. Padding has those of
      a document.

    With `split` a document that does not fit continues in the next sequence, so that all sequences are full. Without it
    a sequence has complete documents of at most `length` tokens together, and the next one begins with the document
    that did not fit; a document that is longer than `length` is cut into parts of that length. The state names the
    document that is read next, and how many of its tokens are used.

        evermoe.data.Packed(documents, length=4096)

    Args:
        documents: an iterable of documents: sequences, arrays or tensors of token numbers, or mappings with
            `input_ids` and perhaps `labels`. Empty ones are left out.
        length: tokens of a sequence.
        split: whether documents continue in the next sequence.
        pad_id: token that fills sequences up to `length`. None for no padding: with `split` the tokens that do not fill
            a sequence at the end of an epoch are left out, and without it sequences have different lengths.

    Raises:
        UnsupportedState: the state of `documents` does not describe its place.
        ValueError: an argument is wrong, or while iterating, a document has no token numbers.
    """

    def __init__(self, documents: Iterable[Any], length: int, *, split: bool = True, pad_id: int | None = None) -> None:
        super().__init__([documents])
        self._length, self._split = checked("length", length, int, least=1), checked("split", split, bool)
        self._pad_id = checked("pad_id", pad_id, int | None)
        self._rest: _Document | None = None
        """The document that was read last, if some of it is left."""
        self._used = 0
        """Number of its tokens that are in sequences."""

    def _begin(self, place: Any) -> None:
        position, used = place or (None, None)
        self._sources[0].open(self._seed, epoch=self._epoch, position=position)
        self._rest = None
        if used is not None:
            self._rest, self._used = self._read(), used
            if self._rest is None or len(self._rest.tokens) <= used:
                raise ValueError(
                    f"expected document {self._sources[0].number - 1} to have more than {used} tokens, as before: an "
                    "iterable must yield the same documents in the same order when it is read again"
                )

    def _read(self) -> _Document | None:
        """Return the next document that is not empty; None without one."""
        while (found := self._sources[0].next()) is not END:
            document = _document(found, self._sources[0].number - 1)
            if len(document.tokens):
                self._used = 0
                return document
        return None

    def _next(self) -> Any:
        parts: list[_Document] = []
        room = self._length
        has_marked = False
        while room:
            if self._rest is None:
                if not has_marked:  # once for each sequence, as it may take as long as to read a document
                    self._sources[0].mark()
                    has_marked = True
                self._rest = self._read()
            if self._rest is None:
                break
            left = len(self._rest.tokens) - self._used
            size = min(left, room if self._split else self._length)
            if size > room:
                break
            place = slice(self._used, self._used + size)
            parts.append(_Document(self._rest.tokens[place], self._rest.labels[place]))
            room, self._used = room - size, self._used + size
            if size == left:
                self._rest = None
        is_left_out = room and self._split and self._pad_id is None
        return END if not parts or is_left_out else self._sequence(parts, room)

    def _sequence(self, parts: list[_Document], room: int) -> dict[str, Tensor]:
        labels = []
        for part in parts:
            labels.append(part.labels.copy())
            labels[-1][0] = IGNORED
        tokens, positions = [part.tokens for part in parts], [np.arange(len(part.tokens)) for part in parts]
        if self._pad_id is not None and room:
            tokens.append(np.full(room, self._pad_id))
            labels.append(np.full(room, IGNORED))
            positions.append(np.arange(room))
        fields = {"input_ids": tokens, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(np.concatenate(each)) for name, each in fields.items()}

    def _place(self) -> Any:
        if self._rest is None:
            self._sources[0].mark()
            return [self._sources[0].position(), None]
        return [self._sources[0].position(back=1), self._used]


def _document(found: Any, number: int) -> _Document:
    """Return the tokens and labels of a document.

    Raises:
        ValueError: it has no token numbers.
    """
    fields = dict(found) if isinstance(found, Mapping) else {"input_ids": found}
    if "input_ids" not in fields:
        raise ValueError(
            f"expected document {number} to have input_ids, the numbers of its tokens, got {', '.join(fields) or '{}'}"
        )
    tokens = _numbers(fields["input_ids"], number)
    labels = tokens if fields.get("labels") is None else _numbers(fields["labels"], number)
    if len(labels) != len(tokens):
        raise ValueError(
            f"expected document {number} to have a label for each token, got {len(tokens)} tokens and {len(labels)} "
            "labels"
        )
    return _Document(tokens, labels)


def _numbers(values: Any, number: int) -> np.ndarray:
    found = np.asarray(values)
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise ValueError(
            f"expected document {number} to be a sequence of token numbers, or a mapping with them as input_ids, got "
            f"{type(values).__name__} of {found.dtype} with {found.ndim} dimensions"
        )
    return found.astype(np.int64)
