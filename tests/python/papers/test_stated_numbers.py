"""Numbers of the papers are written down: nothing that evermoe computes is quoted as a paper's number."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from benches.papers import figure

SOURCES = [path for path in sorted(Path(inspect.getfile(figure)).parent.glob("*.py")) if path.stem != "figure"]
MAKERS = ("stated", "quotient", "change")
"""Functions that make a paper's number, all with its place as the first argument."""

Bindings = dict[str, list[ast.expr | None]]
"""Expressions that each name of a module can be bound to; None is anything else, such as an argument."""


def bindings(tree: ast.Module) -> Bindings:
    found: Bindings = {}
    loops, assigned = [], []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            assigned += [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.For | ast.comprehension):
            loops.append((node.target, node.iter))
        elif isinstance(node, ast.arg):
            found.setdefault(node.arg, []).append(None)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.setdefault(node.target.id, []).append(None)
    for target, value in assigned:
        bind(found, target, value)
    for target, values in loops:
        for value in elements(found, values):
            bind(found, target, value)
    return found


def bind(found: Bindings, target: ast.expr, value: ast.expr | None) -> None:
    """Bind a target, or each of its parts to the part of the value at the same position."""
    if isinstance(target, ast.Name):
        found.setdefault(target.id, []).append(value)
    elif isinstance(target, ast.Tuple):
        fits = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
        for at, part in enumerate(target.elts):
            bind(found, part, value.elts[at] if fits else None)


def elements(found: Bindings, values: ast.expr) -> Iterator[ast.expr | None]:
    """Yield what a loop over an expression binds its target to."""
    if isinstance(values, ast.Tuple | ast.List):
        yield from values.elts
    elif isinstance(values, ast.Name) and values.id in found:
        for each in found[values.id]:
            yield from elements(found, each) if each is not None else [None]
    else:
        yield None


def is_written(node: ast.expr | None, found: Bindings) -> bool:
    """Whether an expression is a number, or names that are bound to numbers alone."""
    if isinstance(node, ast.Name):
        return node.id in found and all(is_written(each, found) for each in found[node.id])
    if isinstance(node, ast.UnaryOp):
        return is_written(node.operand, found)
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float | None)


def computed_numbers(source: str) -> list[str]:
    """Return the calls with which a module quotes a number that it computes."""
    tree = ast.parse(source)
    found = bindings(tree)
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return [
        ast.unparse(call)
        for call in calls
        if call.func.id in MAKERS
        and not all(is_written(given, found) for given in [*call.args[1:], *(word.value for word in call.keywords)])
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_no_number_of_a_paper_is_computed(path):
    assert computed_numbers(path.read_text(encoding="utf-8")) == []


def test_the_papers_numbers_are_made_by_these_functions_alone():
    assert all("Stated(" not in path.read_text(encoding="utf-8") for path in SOURCES)
    assert sum(path.read_text(encoding="utf-8").count("stated(") for path in SOURCES) > 50


@pytest.mark.parametrize(
    "source",
    [
        "stated('4', survival(8, 2, 4))",
        "stated('4', 45 / 34)",
        "stated('4', at_most=100 * share)",
        "best = plan(3)\nstated('4', best)",
        "for number in range(3):\n    stated('4', number)",
        "for name, value in (('a', 1), ('b', plan(2))):\n    stated('4', value)",
        "def row(value):\n    return stated('4', value)",
        "change('4', 2.8861, losses[3])",
    ],
)
def test_a_number_that_is_computed_is_found(source):
    assert len(computed_numbers(source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "stated('4', -0.5)",
        "quotient('4', 45, 34)",
        "STALL = 81.0\nstated('4', STALL)",
        "CASES = (('a', 1), ('b', 2))\nfor name, value in CASES:\n    stated('4', value)",
        "for least, plan in ((1, f()), (2, g())):\n    stated('4', at_least=least)",
    ],
)
def test_a_number_that_is_written_down_is_not(source):
    assert computed_numbers(source) == []
