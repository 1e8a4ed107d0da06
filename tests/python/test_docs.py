"""README and docs: every Python block runs, links lead somewhere, the README stays short.

As a script, `python test_docs.py PAGE…` runs each page's blocks in a process of its own, in one namespace.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = {
    "docs/guides/data.md": 3,
    "docs/guides/islands.md": 1,
    "docs/guides/pipelines.md": 1,
    "docs/operations/observe.md": 1,
}
"""Blocks that need a GPU, several machines, a bucket or other packages, by page; a comment says why."""
MAX_README_LINES = 200
LONG, SHORT = "session.steps(1000)", "session.steps(150)"
"""A run that gives its reader time to kill a worker, and as much of it as shows what it prints."""
LIMIT_SECONDS = 300
BLOCK = re.compile(r"(<!-- no-run: [^>]+ -->\n)?^( *)```python\n(.*?)^\2```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^( *)(```+)[^\n]*\n.*?^\1\2$", re.M | re.S)


class Block(NamedTuple):
    """One Python block of a page."""

    line: int
    """Lines of the page before its first one."""
    source: str
    runs: bool


def blocks(page: Path) -> list[Block]:
    """The page's Python blocks, in order."""
    text = page.read_text(encoding="utf-8")
    return [Block(text[: found.start(3)].count("\n"), found[3], found[1] is None) for found in BLOCK.finditer(text)]


def name(page: Path) -> str:
    """The page's path from the repository's root."""
    return page.relative_to(ROOT).as_posix()


def run(page: Path) -> int:
    """Runs the page's blocks in a fork of this process; an error names the page and its line. Returns the exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    namespace = {"__name__": "__main__"}
    failed = False
    listeners = kept_listeners()
    try:
        for block in blocks(page):
            if block.runs:
                source = block.source.replace(LONG, SHORT)
                exec(compile("\n" * block.line + source, str(page), "exec"), namespace)
        for listener in listeners:
            hear(listener)
        refuse_missing_attributes(page, namespace)
    except BaseException:
        traceback.print_exc()
        failed = True
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(failed)  # to take down all that is imported takes two seconds


def kept_listeners() -> list[Any]:
    """The listeners of all sessions from now on."""
    from evermoe.session import session

    found: list[Any] = []
    combined = session.combined

    def keep(given: Any, more: Any = ()) -> Any:
        found.extend([given] if callable(given) else given)
        return combined(given, more)

    session.combined = keep  # type: ignore[assignment]
    return found


def hear(listener: Any) -> None:
    """Send a listener each kind of event, also those that a run of the page does not have."""
    from evermoe import events

    values = {"int": 1, "float": 1.0, "str": "a", "bool": True}
    for kind in vars(events).values():
        if isinstance(kind, type) and issubclass(kind, events.Event) and kind is not events.Event:
            types = {each.name: str(each.type) for each in dataclasses.fields(kind)}
            made = {name: values.get(text, {} if text.startswith("dict") else []) for name, text in types.items()}
            listener(kind(**made))


def refuse_missing_attributes(page: Path, namespace: dict[str, Any]) -> None:
    """Refuses text that names what an object of the page's code does not have, as `report.sources`."""
    for word, attribute in re.findall(r"`([a-z_]\w*)\.(\w+)`", page.read_text(encoding="utf-8")):
        assert word not in namespace or hasattr(namespace[word], attribute), f"{page}: {word}.{attribute} is missing"


def main(pages: list[Path]) -> int:
    """Imports once what most pages need, then runs them one after another; the exit code."""
    import torch._dynamo  # noqa: F401 -- which the first optimizer imports

    import evermoe.session.session  # noqa: F401
    import support.frozen  # noqa: F401 -- the last of these

    failed = [str(page) for page in pages if run(page) != 0]
    print("failed:", ", ".join(failed) or "none", flush=True)
    return len(failed)


@pytest.mark.timeout(LIMIT_SECONDS + 20)
def test_python_blocks_of_pages_run(tmp_path):
    pages = [page for page in PAGES if any(block.runs for block in blocks(page))]
    done = subprocess.run(
        [sys.executable, __file__, *map(str, pages)],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LIMIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_listeners_get_all_events_and_text_names_attributes_that_exist(tmp_path):
    with pytest.raises(AttributeError, match="'ConnectionLost' object has no attribute 'sources'"):
        hear(lambda event: event.sources if event.name == "connection_lost" else None)
    page = tmp_path / "page.md"
    page.write_text("`other.sources` and `report.sources`")
    with pytest.raises(AssertionError, match=r"report\.sources is missing"):
        refuse_missing_attributes(page, {"report": 1})
    refuse_missing_attributes(page, {"report": type("Report", (), {"sources": {}})})


def test_only_blocks_that_need_more_than_this_machine_are_left_out():
    left_out = {name(page): sum(not block.runs for block in blocks(page)) for page in PAGES}
    assert {page: number for page, number in left_out.items() if number} == NOT_RUN


def test_every_python_fence_is_found():
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert len(blocks(page)) == len(re.findall(r"^ *```(?:python|py)\b", text, re.M)), name(page)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


@pytest.mark.parametrize("page", [*PAGES[1:], *sorted(ROOT.glob("[A-Z]*.md"))], ids=name)
def test_relative_links_lead_to_files_and_headings(page):
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    broken = [link for link in LINK.findall(text) if "://" not in link and not leads_somewhere(page, link)]
    assert not broken, f"{name(page)} links to {broken}"


def leads_somewhere(page: Path, link: str) -> bool:
    """Whether a relative link names a file or folder, and a heading in it if it names one."""
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or (not path and not anchor):
        return False
    return not anchor or target.suffix != ".md" or anchor in anchors(target)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as Markdown renderers make them."""
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    titles = [re.sub(r"[^\w\- ]", "", title.lower()).strip() for title in re.findall(r"^#+ +(.+)$", text, re.M)]
    return {title.replace(" ", "-") for title in titles}


def test_fixed_limits_are_defined_where_the_page_says():
    page = (ROOT / "docs/operations/limits.md").read_text(encoding="utf-8")
    found = re.findall(r"`((?:src/)?[\w/]+\.(?:py|rs))` `([A-Z_]+)` \|$", page, re.M)
    assert len(found) > 10
    for path, constant in found:
        source = (ROOT / path if path.startswith("src/") else ROOT / "python/evermoe" / path).read_text(
            encoding="utf-8"
        )
        assert re.search(rf"^(?:pub const )?{constant}\b.*=", source, re.M), f"{path} does not define {constant}"


def shown(page: Path, what: str) -> list[tuple[str, str]]:
    """The rows of a page's tables of mechanisms or habits: their names, and what the last column says shows them."""
    tables = re.findall(rf"^\| {what} \|.*\n\|[-|]+\n((?:\|.*\n)*)", page.read_text(encoding="utf-8"), re.M)
    cells = [re.split(r" \| ", row.strip("| ")) for table in tables for row in table.splitlines()]
    return [(row[0], row[-1]) for row in cells]


def shown_by(text: str) -> list[tuple[Path, list[str]]]:
    """The files that a text names, and of each the tests whose names follow it."""
    found: list[tuple[Path, list[str]]] = []
    for word in re.findall(r"`([^`]+)`", text):
        if "/" in word or word.endswith(".py"):
            in_root = word.startswith(("tests/", "benches/"))
            found.append((ROOT / word if in_root else ROOT / "tests" / "python" / word, []))
        elif word.startswith(("test_", "check_")):
            found[-1][1].append(word.partition("[")[0])
    return found


@pytest.mark.parametrize(
    ("page", "what", "least"), [("papers.md", "mechanism", 60), ("development/habits.md", "habit", 45)]
)
def test_every_mechanism_and_habit_names_tests_that_exist(page, what, least):
    rows = shown(ROOT / "docs" / page, what)
    assert len(rows) > least
    for mechanism, text in rows:
        files = shown_by(text)
        assert any(path.name.startswith("test_") or path.suffix == ".rs" for path, _ in files), mechanism
        for path, tests in files:
            assert path.is_file(), f"{mechanism}: {path}"
            missing = [test for test in tests if f"def {test}(" not in path.read_text(encoding="utf-8")]
            assert not missing, f"{mechanism}: {missing} in {path}"


def test_every_page_is_in_the_navigation():
    listed = set(re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M))
    assert listed == {page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:]}


if __name__ == "__main__":
    sys.exit(main([Path(page) for page in sys.argv[1:]]))
