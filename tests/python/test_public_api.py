"""The public names and their signatures, frozen in `public_api.txt`.

To accept a change: `python tests/python/test_public_api.py --update`.
"""

import dataclasses
import difflib
import importlib
import inspect
import sys
from pathlib import Path
from typing import ForwardRef

from transformers import TrainingArguments

import evermoe
from evermoe.events import Event
from evermoe.options import Options
from evermoe.presets import PresetOptions

FROZEN = Path(__file__).with_name("public_api.txt")
MODULES = [
    "evermoe",
    *(f"evermoe.{name}" for name in evermoe._MODULES),
    "evermoe.profile",
    "evermoe.integrations.transformers",
    "evermoe.integrations.transformers.trainer",
]
NOT_MADE_BY_USERS = {"Routing", "Step", "StepGradients"}
"""Classes whose objects come from a session or a block alone: their constructors are not public."""
MAX_KEYWORDS = 15
"""Keyword options of a constructor or a function; what it cannot do without is positional."""
MAX_NAMES = 78
"""Public names, the event classes counted as one: a user reads about those that a listener of theirs needs."""


def public():
    """Return the value of each public name, by its full name. Modules are no names: they hold them."""
    found = {}
    for module in map(importlib.import_module, MODULES):
        assert len(set(module.__all__)) == len(module.__all__), module.__name__
        found |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    return found


class Text(str):
    """Part of a signature that is written without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def is_event(value):
    return inspect.isclass(value) and issubclass(value, Event)


def shown(value):
    """Return a default as source: functions and classes by their names, without an address."""
    if value is inspect.Parameter.empty:
        return value
    if isinstance(value, tuple) and value:
        return Text(f"({', '.join(str(shown(each)) for each in value)})")
    return Text(value.__name__) if hasattr(value, "__name__") else value


def signature_of(function):
    """Return the signature with annotations as they are written."""
    signature = inspect.signature(function)
    parameters = [
        each.replace(default=shown(each.default), annotation=plain(each.annotation))
        for each in signature.parameters.values()
    ]
    return str(signature.replace(parameters=parameters, return_annotation=plain(signature.return_annotation)))


def plain(annotation):
    if isinstance(annotation, ForwardRef):
        annotation = annotation.__forward_arg__
    return Text(annotation) if isinstance(annotation, str) else annotation


def described(name, value):
    """Return the lines of one name: its signature, then its fields or public members."""
    if not inspect.isclass(value):
        return [f"{name}{signature_of(value)}"]
    if is_event(value):
        return [name, *(f"    {each.name}: {each.type}" for each in dataclasses.fields(value))]
    is_made_by_users = value.__name__ not in NOT_MADE_BY_USERS and not issubclass(value, Exception)
    has_own = any(each.__module__.startswith("evermoe.") and "__init__" in vars(each) for each in value.__mro__)
    is_own = has_own and not issubclass(value, TrainingArguments)
    lines = [f"{name}{signature_of(value)}" if (is_own or is_tuple(value)) and is_made_by_users else name]
    for member, found in sorted(members_of(value).items()):
        if isinstance(found, property):
            lines.append(f"    {member}: {found.fget.__annotations__['return']}")
        elif isinstance(found, staticmethod | classmethod) or inspect.isfunction(found):
            lines.append(f"    {member}{signature_of(getattr(found, '__func__', found))}")
    return lines


def is_tuple(value):
    return issubclass(value, tuple)


def members_of(kind):
    """Return the public members that evermoe itself gives a class, without those of all groups of options."""
    ours = [each for each in reversed(kind.__mro__) if each.__module__.startswith("evermoe.")]
    found = {name: value for each in ours if each not in (Options, PresetOptions) for name, value in vars(each).items()}
    functions = {name: value for name, value in found.items() if not name.startswith("_")}
    return {name: value for name, value in functions.items() if getattr(value, "__name__", name) == name}


def written():
    return "".join(f"{line}\n" for name, value in sorted(public().items()) for line in described(name, value))


def count_names(names):
    return sum(not is_event(value) for value in names.values()) + 1


def test_public_names_and_signatures_are_those_on_file():
    difference = difflib.unified_diff(
        FROZEN.read_text().splitlines(), written().splitlines(), "public_api.txt", "the package", lineterm="", n=1
    )
    text = "\n".join(difference)
    assert not text, f"the public surface has changed; if that is meant, run {Path(__file__).name} --update\n{text}"


def test_public_names_are_few():
    assert count_names(public()) <= MAX_NAMES


def test_constructors_have_few_keywords():
    found = {}
    for name, value in public().items():
        if f"{name}(" in written():
            parameters = inspect.signature(value).parameters.values()
            found[name] = sum(each.kind is inspect.Parameter.KEYWORD_ONLY for each in parameters)
    many = {name: number for name, number in found.items() if number > MAX_KEYWORDS}
    assert many == {"evermoe.Membership": 21, "evermoe.Session": 16}, (
        "the first has what differs between clusters, most of it from the environment"
    )


def test_each_public_name_is_documented():
    undocumented = [name for name, value in public().items() if not inspect.getdoc(value)]
    assert not undocumented


def test_reference_pages_list_only_public_names():
    listed = set()
    for page in (Path(__file__).parents[2] / "docs/reference").glob("*.md"):
        listed |= {line.removeprefix("::: ") for line in page.read_text().splitlines() if line.startswith("::: ")}
    names = public()
    assert not {name for name in listed if name not in names and name not in MODULES}
    covered = {name for name in names if name in listed or name.rpartition(".")[0] in listed}
    assert set(names) == covered


if __name__ == "__main__":
    if sys.argv[1:] == ["--update"]:
        FROZEN.write_text(written())
    names = public()
    print(f"{count_names(names)} public names, {sum(map(is_event, names.values()))} event classes counted as one")
