"""The demo of presets that may lose tokens, in real processes: it says as many as its routers have counted."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

ONE_REPLICA = ["--workers", "3", "--experts", "9", "--slots", "3", "--kill", "2@20", "--no-join"]
"""Each expert trains on one node, and one of them dies."""
SMALL = ["--layers", "2", "--hidden", "32", "--intermediate", "32", "--sequence", "16", "--baseline-steps", "0"]


@pytest.mark.timeout(200)
@pytest.mark.parametrize("preset", ["pec", "moetion"])
def test_lost_tokens_are_as_many_as_the_routers_have_counted(tmp_path, preset):
    out, memory = tmp_path / "summary.json", tmp_path / "memory"
    memory.mkdir(mode=0o700)
    files = ["--json", str(out), "--plot", str(tmp_path / "demo.png"), "--memory-dir", str(memory)]
    command = [
        sys.executable,
        "-m",
        "evermoe",
        "demo",
        *SMALL,
        *ONE_REPLICA,
        *files,
        "--preset",
        preset,
        "--steps",
        "30",
    ]
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=150, cwd=tmp_path)
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    result = json.loads(out.read_text())
    assert result["ok"], result["problems"]
    assert result["plt"] > 0
    assert result["plt"] == pytest.approx(result["plt_counted"], abs=1e-12)
