"""ARCHITECTURE.md names what exists, and its maps are those that the layering tests hold."""

import re
from functools import cache
from pathlib import Path

import pytest

from test_layering import ROOMS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "evermoe"
PAGE = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
FENCED = re.compile(r"^```[^\n]*\n(.*?)^```$", re.M | re.S)
QUOTED = sorted(set(re.findall(r"`([^`\n]+)`", FENCED.sub("", PAGE))))
SOURCES = {".py", ".pyi", ".rs", ".cu", ".cuh", ".h"}
NOT_OURS = {"except", "False", "None", "True"}


def rows(heading: str) -> list[str]:
    """Return the first words of the map below a heading, without the suffixes of files and folders."""
    (text,) = re.findall(rf"^### {heading}.*?^```text\n(.*?)^```", PAGE, re.M | re.S)
    return [re.sub(r"(/|\.py)$", "", line.split()[0]) for line in text.splitlines() if line[:1].isalpha()]


@cache
def words_of_sources() -> set[str]:
    files = [path for name in ("src", "kernels", "python", "tests") for path in (ROOT / name).rglob("*")]
    texts = (path.read_text(encoding="utf-8") for path in files if path.suffix in SOURCES)
    return {word for text in texts for word in re.findall(r"\w+", text)}


def exists(path: str) -> bool:
    if "/" not in path:
        return any(any(folder.rglob(path)) for folder in (ROOT / "src", ROOT / "kernels", ROOT / "tests", PACKAGE))
    return any((folder / path).exists() for folder in (ROOT, PACKAGE))


@pytest.mark.parametrize("quoted", QUOTED)
def test_paths_and_names_of_the_page_exist(quoted):
    for word in quoted.split():
        if "/" in word or re.search(r"\.(py|rs|cu|cuh|md)$", word):
            assert exists(word), f"{word} is no file or folder"
        elif re.fullmatch(r"[A-Za-z_][\w.]*(\(\))?", word):
            missing = set(re.findall(r"\w+", word)) - words_of_sources() - NOT_OURS
            assert not missing, f"{quoted}: no source has {', '.join(missing)}"


def test_the_map_of_python_is_the_order_of_imports():
    named = rows("Python")
    assert [room for room in ROOMS if room in named] == named, "expected the order of ROOMS in test_layering.py"
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(named)


def test_the_map_of_rust_is_that_of_the_crate():
    modules = {path.stem for path in (ROOT / "src").iterdir()} - {"lib"}
    assert set(rows("Rust")) == modules
    text = (ROOT / "src" / "lib.rs").read_text(encoding="utf-8")
    table = set(re.findall(r"^//! \| \[?`(\w+)`\]? \|", text, re.M))
    public = set(re.findall(r"^pub mod (\w+);", text, re.M)) - {"error"}  # whose types the crate exports itself
    assert public <= table, "the tables of src/lib.rs"


def test_the_map_of_rust_is_in_the_order_of_its_layers():
    (layers,) = re.findall(r"^const LAYERS.*?\[\n(.*?)^\];", (ROOT / "tests/layering.rs").read_text(), re.M | re.S)
    allowed = {
        name: set(re.findall(r'"(\w+)"', uses))
        for name, uses in re.findall(r'\(\s*"(\w+)",\s*&\[(.*?)\]', layers, re.S)
    }
    named = rows("Rust")
    for number, name in enumerate(named):
        assert allowed.get(name, set()) <= set(named[:number]), f"{name} stands above a module that it uses"
