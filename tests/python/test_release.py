"""The version and the extras are said in one place, and everything else agrees with it."""

import re
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
    assert extras == {"cli", "plot", "docs", "transformers", "test"}
    files = [
        ROOT / "README.md",
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/**/*.*"),
        *ROOT.glob("python/**/*.py"),
    ]
    named = {file: re.findall(r"evermoe\[([\w,]+)\]", file.read_text(encoding="utf-8")) for file in files}
    assert any(named.values())
    for file, lists in named.items():
        assert {extra for names in lists for extra in names.split(",")} <= extras, file
