#!/usr/bin/env python3
"""Print the installed dependencies of evermoe and its tests, without those of torch, as pip requirements."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CARRIED = Requirement("evermoe[cli,test]")
INSTALLED = [Requirement("torch"), Requirement("numpy")]


def needs(requirements: list[Requirement]) -> dict[str, str]:
    """Return names and versions of distributions and all their dependencies."""
    found: dict[str, str] = {}
    left = list(requirements)
    seen = set()
    while left:
        requirement = left.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in seen:
            continue
        seen.add((name, frozenset(requirement.extras)))
        installed = distribution(name)
        found[name] = installed.version
        left += _needed_by(installed.requires or [], requirement.extras)
    return found


def _needed_by(lines: list[str], extras: set[str]) -> Iterator[Requirement]:
    for line in lines:
        requirement = Requirement(line)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras | {""}):
            yield requirement


if __name__ == "__main__":
    installed = needs(INSTALLED)
    for name, version in sorted(needs([CARRIED]).items()):
        if name not in installed and name != "evermoe":
            print(f"{name}=={version}")
