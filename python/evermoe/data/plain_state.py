"""States of loaders as JSON, with tensors, arrays, bytes, tuples and keys that are not strings."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TENSOR, _ARRAY, _BYTES, _TUPLE, _PAIRS = "__tensor__", "__array__", "__bytes__", "__tuple__", "__pairs__"
_PLAIN = frozenset((int, float, str, bool, type(None)))
_TAGS = frozenset((_TENSOR, _ARRAY, _BYTES, _TUPLE, _PAIRS))


def to_json(state: Any) -> Any:
    """Convert a state to JSON types, which `from_json` inverts. Leave other values that JSON cannot represent as is."""
    if isinstance(state, list):
        return state if _is_plain(state) else [to_json(value) for value in state]
    if isinstance(state, dict) and all(isinstance(key, str) for key in state) and not _TAGS & state.keys():
        return {key: to_json(value) for key, value in state.items()}
    tag, content = _tagged(state)
    return state if tag is None else {tag: content}


def _is_plain(values: list[Any]) -> bool:
    """Whether a list, which may be long, has numbers and text alone."""
    return _PLAIN.issuperset(map(type, values))


def _tagged(state: Any) -> tuple[str | None, Any]:
    if isinstance(state, dict):
        return _PAIRS, [[to_json(key), to_json(value)] for key, value in state.items()]
    if isinstance(state, tuple):
        return _TUPLE, [to_json(value) for value in state]
    if isinstance(state, bytes | bytearray):
        return _BYTES, _text(bytes(state))
    if isinstance(state, Tensor):
        data = state.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return _TENSOR, [str(state.dtype).removeprefix("torch."), list(state.shape), _text(data)]
    if isinstance(state, np.ndarray | np.generic) and not state.dtype.hasobject:
        return _ARRAY, [state.dtype.str, list(state.shape), _text(state.tobytes()), isinstance(state, np.generic)]
    return None, state


def from_json(state: Any) -> Any:
    """Invert `to_json`."""
    if isinstance(state, list):
        return state if _is_plain(state) else [from_json(value) for value in state]
    if not isinstance(state, dict):
        return state
    tag = next(iter(_TAGS & state.keys()), None)
    return {key: from_json(value) for key, value in state.items()} if tag is None else _untagged(tag, state[tag])


def _untagged(tag: str, content: Any) -> Any:
    if tag == _TENSOR:
        name, shape, data = content
        raw = torch.from_numpy(np.frombuffer(bytearray(_bytes(data)), np.uint8))  # may be empty
        return raw.view(getattr(torch, name)).view(shape)
    if tag == _ARRAY:
        name, shape, data, is_scalar = content
        array = np.frombuffer(bytearray(_bytes(data)), dtype=np.dtype(name)).reshape(shape)
        return array[()] if is_scalar else array
    if tag == _BYTES:
        return _bytes(content)
    return tuple(from_json(content)) if tag == _TUPLE else dict(from_json(content))


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
