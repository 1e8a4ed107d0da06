"""Descriptions of options for `--help`: the docstrings that follow the fields in the source of their classes."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from dataclasses import fields
from functools import cache

from evermoe.options import Options


def descriptions(options: type[Options]) -> dict[str, str]:
    """Return the docstring of each field on one line, by its name; without the classes' source an empty mapping."""
    found: dict[str, str] = {}
    for kind in reversed(options.__mro__):
        if issubclass(kind, Options):
            found |= _fields_of_classes(kind.__module__).get(kind.__name__, {})
    return {each.name: found[each.name] for each in fields(options) if each.name in found}


def first_sentence(text: str) -> str:
    """Return the first sentence of a docstring, without a full stop and marks of code."""
    return re.split(r"\.(?:\s|$)|; ", text, maxsplit=1)[0].replace("`", "")


@cache
def _fields_of_classes(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of the fields of each class of a module."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except OSError:
        return {}
    return {each.name: _fields(each.body) for each in tree.body if isinstance(each, ast.ClassDef)}


def _fields(body: list[ast.stmt]) -> dict[str, str]:
    found: dict[str, str] = {}
    for field, text in zip(body, body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found
