"""The version and the extras are said in one place, and everything else agrees with it."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import evermoe

ROOT = Path(__file__).resolve().parents[2]


def said(file, pattern):
    return re.findall(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)


def test_the_version_is_cargos():
    [version] = said("Cargo.toml", r'^version = "(.+)"$')
    assert metadata.version("evermoe") == version, "installed from another version: make setup"
    assert evermoe.__version__ == version
    assert said("Cargo.lock", r'^name = "evermoe"\nversion = "(.+)"$') == [version]
    assert not said("pyproject.toml", r"^version =")


def test_the_changelogs_newest_release_is_this_version():
    if not (ROOT / "CHANGELOG.md").exists():
        return
    headings = said("CHANGELOG.md", r"^## \[?([^\]\s]+)")
    assert headings
    assert [each for each in headings if each.lower() != "unreleased"][:1] in (
        [],
        said("Cargo.toml", r'^version = "(.+)"$'),
    )


def test_extras_that_are_named_anywhere_exist():
    [table] = said("pyproject.toml", r"^\[project\.optional-dependencies\]\n((?:.+\n)+)")
    extras = set(re.findall(r"^(\w+) = \[", table, re.MULTILINE))
    assert extras == {"cli", "plot", "observe", "docs", "transformers", "test", "ucx"}
    files = [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.*"),
        *ROOT.glob("python/**/*.py"),
    ]
    texts = {file: file.read_text(encoding="utf-8") for file in files if "__pycache__" not in file.parts}
    named = {file: re.findall(r"evermoe\[([\w,]+)\]", text) for file, text in texts.items()}
    assert any(named.values())
    for file, lists in named.items():
        assert {extra for names in lists for extra in names.split(",")} <= extras, file


def test_what_is_carried_to_a_machine_with_torch_is_all_that_evermoe_needs():
    command = [sys.executable, str(ROOT / "tests" / "release" / "carried.py")]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    names = {line.split("==")[0] for line in lines}
    assert {"torchft", "opentelemetry-sdk", "safetensors", "rich", "pytest-xdist"} <= names
    assert not names & {"torch", "numpy", "evermoe", "typing-extensions"}
    assert all(metadata.version(line.split("==")[0]) == line.split("==")[1] for line in lines)
