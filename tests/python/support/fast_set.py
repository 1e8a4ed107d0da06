"""Decides which tests `make test` runs. The others run in `make test-all` or `make test-long`.

A test runs in `make test` unless it starts a process or compiles something. This is read from its code, that of its
fixtures, and what they use in `tests/python`. About thirty tests of complete jobs run nevertheless, one for each kind
of failure and for each preset: they carry the mark `quick`. A slow test that starts no process carries the mark `full`.
"""

from __future__ import annotations

import importlib
import multiprocessing.context
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1]
STARTERS = {"subprocess", "multiprocessing", "evermoe.launch", "evermoe.demo.driver", "benches.compare.runner"}
"""Modules that start processes."""


def mark(items: list[Any]) -> None:
    """Mark cases beyond those that `few` names as `long`, and tests for `make test-all` as `full`."""
    cases: dict[str, list[Any]] = {}
    chosen: dict[tuple[str, str], Any] = {}
    for item in items:
        base = item.nodeid.split("[")[0]
        if _is_one_of_few(item) and not item.get_closest_marker("long") and not item.get_closest_marker("gpu"):
            cases.setdefault(base, []).append(item)
    for found in cases.values():
        _keep_few(found)
    for item in items:
        quick = item.get_closest_marker("quick")
        if quick and not item.get_closest_marker("long") and not item.get_closest_marker("gpu"):
            chosen.setdefault((item.nodeid.split("[")[0], quick.args[0]), item)
    for item in items:
        if "/kernels/" in item.nodeid:
            item.add_marker("kernels")
        if item not in chosen.values() and starts_processes(item):
            item.add_marker("full")


def _is_one_of_few(item: Any) -> bool:
    """Return whether only some cases of the test run outside `make test-long`: tests of jobs, and those that say so."""
    return bool(item.get_closest_marker("few")) or "start_job" in item.fixturenames


def _keep_few(cases: list[Any]) -> None:
    """Mark all but a few cases as `long`. Those that stay are spread evenly, from the first to the last."""
    few = cases[0].get_closest_marker("few")
    count = few.args[0] if few else 1
    always = {round(number * (len(cases) - 1) / max(1, count - 1)) for number in range(count)}
    for number, item in enumerate(cases):
        if number not in always:
            item.add_marker("long")


def starts_processes(item: Any) -> bool:
    """Return whether a collected test, or one of its fixtures, starts a process or compiles."""
    function = getattr(item, "function", None)
    if function is None:  # a doctest
        return False
    known = item._fixtureinfo.name2fixturedefs
    fixtures = [definition.func for name in item.fixturenames for definition in known.get(name, ())[-1:]]
    return any(reaches_a_start(each) for each in [function, *fixtures])


def reaches_a_start(function: Any) -> bool:
    """Return whether a function, or one of `tests/python` that it uses, starts a process or compiles."""
    seen: set[Any] = set()
    found = _reaches(function, seen)
    if not found:
        _known.update(dict.fromkeys(seen, False))
    return found


_known: dict[Any, bool] = {}


def _reaches(value: Any, seen: set[Any]) -> bool:
    """Return whether a function, class or module that code names leads to a new process, or to `torch.compile`.

    `seen` has what is on the way to an answer: functions that call each other.
    """
    if isinstance(value, multiprocessing.context.BaseContext):
        return True
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    if isinstance(module, str) and (module in STARTERS or module.split(".")[0] in STARTERS):
        return True
    functions = list(_functions(value))
    if not functions or value in seen:
        return False
    if value not in _known:
        seen.add(value)
        if any(_names_a_starter(each, seen) for each in functions):
            _known[value] = True
        return _known.get(value, False)
    return _known[value]


def _functions(value: Any) -> Iterator[types.FunctionType]:
    """Yield a function of `tests/python`, or the methods of a class."""
    if isinstance(value, type):
        members = [member for base in value.__mro__ for member in vars(base).values()]
    else:
        members = [getattr(value, "__wrapped__", value)]
    for member in members:
        is_method = isinstance(member, staticmethod | classmethod)
        function = member.__func__ if is_method else member.fget if isinstance(member, property) else member
        if isinstance(function, types.FunctionType) and function.__code__.co_filename.startswith(str(FOLDER)):
            yield function


def _names_a_starter(function: types.FunctionType, seen: set[Any]) -> bool:
    names = set(_names(function.__code__))
    if names & {"fork", "getfixturevalue"} or names >= {"torch", "compile"}:  # fixtures by name are those of servers
        return True
    found = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    found += [function.__globals__[name] for name in names if name in function.__globals__]
    found += [importlib.import_module(name) for name in names if name.startswith("support.")]
    modules = [each for each in found if _is_of_tests(each)]
    found += [vars(module)[name] for module in modules for name in names if name in vars(module)]
    return any(_reaches(each, seen) for each in found)


def _names(code: types.CodeType) -> Iterator[str]:
    """Yield the global names and attributes that code uses, also in functions that it defines."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _is_of_tests(value: Any) -> bool:
    return isinstance(value, types.ModuleType) and (getattr(value, "__file__", None) or "").startswith(str(FOLDER))
