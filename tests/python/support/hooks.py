"""Hooks that ask for another machine when a member is lost, and what they have noted."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evermoe.events import MemberLost

NOTE = """
cat > {folder}/$EVERMOE_LOST_KEY.$EVERMOE_LOST_ATTEMPT.json
printf '%s %s %s %s\\n' "$EVERMOE_LOST_KEY" "$EVERMOE_LOST_KIND" "$EVERMOE_LOST_ATTEMPT" "$PPID" >> {folder}/calls
"""
"""A command that keeps what it was given, and then notes who has called it."""
WAIT = "for i in $(seq 6000); do [ -e {folder}/go ] && break; sleep 0.01; done"
"""Waits until the test says so, or is long over."""


@dataclass(frozen=True)
class Call:
    """One call of the hook."""

    key: str
    kind: str
    attempt: int
    pid: int
    """Of the member that has called."""


def calls(folder: Path) -> list[Call]:
    """All calls of `NOTE` in this folder, in their order."""
    path = folder / "calls"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [Call(key, kind, int(attempt), int(pid)) for key, kind, attempt, pid in map(str.split, lines)]


def given(folder: Path, call: Call) -> dict[str, Any]:
    """Return what the command of a call has read."""
    return json.loads((folder / f"{call.key}.{call.attempt}.json").read_text())


def write(path: Path, gone: MemberLost) -> None:
    """A hook that is a function: notes a call, then fails."""
    with path.open("a") as file:
        file.write(f"{gone.key} {gone.kind} {gone.attempt} {os.getpid()}\n")
    raise LookupError("no machines left")
