"""Processes end with their own exit code, though threads of theirs are inside native code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support import exits

LIMIT = 240.0
"""Seconds: far more than all of them take."""


@pytest.fixture(scope="module")
def ended():
    """By kind, the exit code and the seconds until the end of a process; and what all have printed."""
    line = [sys.executable, str(Path(exits.__file__)), *exits.KINDS]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=LIMIT)
    rows = [each.split() for each in done.stdout.splitlines() if each.count(" ") == 2 and not each.endswith("at exit")]
    return {kind: (int(code), float(seconds)) for kind, code, seconds in rows}, done.stdout + done.stderr


@pytest.mark.parametrize("kind", exits.KINDS)
def test_a_script_keeps_its_exit_code_and_its_exit_handlers(ended, kind):
    found, printed = ended
    assert found[kind][0] == exits.CODE, printed
    assert f"{kind} at exit" in printed
