"""`python -m benches.papers`: the registry, what is said of each number, the page, the command."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from benches.papers.__main__ import main
from benches.papers.evidence import as_json, difference, markdown, section
from benches.papers.figure import PAPERS, How, Row, reasons, stated
from benches.papers.registry import FIGURES, find

EVIDENCE = Path(__file__).parents[3] / "docs" / "evidence.md"
QUICK = {figure.id: figure for figure in FIGURES.values() if not figure.is_slow}
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*")


@pytest.fixture(scope="module")
def computed():
    """Every quick figure with its rows."""
    return {name: (figure, figure.rows()) for name, figure in QUICK.items()}


def test_every_paper_has_figures_and_counter_examples_for_what_is_known_to_err():
    assert {name.partition("-")[0] for name in FIGURES} == set(PAPERS)
    errors = {name for name, figure in FIGURES.items() if figure.is_error}
    assert errors >= {
        "gemini-corollary1",
        "pec-algorithm1",
        "lazarus-theorem1",
        "baft-algorithm2",
        "moetion-algorithm2",
    }


def test_what_is_not_computed_says_so():
    for figure in FIGURES.values():
        if figure.rows is list:
            assert "ot stated in our copy" in figure.note or "no time of a checkpoint" in figure.note, figure.id


@pytest.mark.full
def test_every_row_has_numbers_a_way_and_a_reason(computed):
    for figure, rows in computed.values():
        assert rows or figure.rows is list, figure.id
        for row in rows:
            assert row.quantity and row.why and row.how in get_args(How), row
            assert row.how != "real run", row
            assert math.isfinite(row.ours), row
            assert row.paper is not None or row.difference is None


@pytest.mark.long
def test_simulations_repeat_to_the_digit():
    figures = [figure for name, figure in QUICK.items() if name in ("gemini-f15", "lazarus-f6", "moetion-ettr")]
    for figure in figures:
        one, other = ([row.ours for row in figure.rows() if row.how == "simulation"] for _ in range(2))
        assert one and one == other, figure.id


@pytest.mark.full
def test_every_quoted_number_says_where_it_stands(computed):
    place = re.compile(r"(sections? \d|abstract|appendix [A-Z]|experiment setup)")
    for figure, rows in computed.values():
        places = [row.paper.place for row in rows if row.paper is not None]
        assert all(place.match(text) for text in places), places
        if places and (number := re.fullmatch(r"\w+-([ft])(\d+)[ab]?", figure.id)):
            kind = {"f": "Figure", "t": "Table"}[number[1]]
            assert any(re.search(rf"{kind}s? {number[2]}[ab]?\b", text) for text in places), figure.id


def test_numbers_of_a_paper_are_values_or_bounds():
    assert stated("2", 50).difference(25) == -0.5
    assert stated("2", at_least=50).difference(60) == 0
    assert stated("2", at_most=2).difference(3) == 0.5
    assert stated("2", at_least=1, at_most=3).difference(0.5) == -0.5
    assert stated("2", 0).difference(0) == 0 and stated("2", 0).difference(1) is None
    assert [str(stated("2", 50)), str(stated("2", at_least=50)), str(stated("2", at_most=2))] == ["50", "≥ 50", "≤ 2"]
    assert str(stated("2", at_least=1, at_most=3)) == "1 to 3"
    for bad in ({}, {"at_least": 3, "at_most": 1}):
        with pytest.raises(ValueError, match="expected low <= high"):
            stated("2", **bad)
    with pytest.raises(ValueError, match="and a place"):
        stated("", 1)


def test_ids_papers_and_all_name_figures():
    assert [figure.id for figure in find(["gemini-f9", "gemini-eq1"])] == ["gemini-eq1", "gemini-f9"]
    assert {figure.id for figure in find(["all"])} == set(QUICK)
    assert {figure.id for figure in find(["all"], is_slow=True)} == set(FIGURES)
    assert {figure.id for figure in find(["pec"])} == {name for name in QUICK if name.startswith("pec-")}
    assert find(["pec-f6"])[0].is_slow


@pytest.mark.parametrize(
    ("name", "close"), [("gemini-f90", "gemini-f9"), ("lazurus", "lazarus"), ("PEC-f2b", "pec-f2b")]
)
def test_an_unknown_id_gets_close_ones(name, close):
    with pytest.raises(ValueError, match=f"got '{name}': did you mean .*{close}"):
        find([name])


def test_a_name_like_no_other_gets_the_list():
    with pytest.raises(ValueError, match="papers list has all"):
        find(["???"])


def row(ours, paper=None, why="because"):
    return Row(quantity="q", unit="s", paper=paper, ours=ours, how="exact", why=why)


def test_differences_and_repeated_reasons_read_well():
    assert difference(row(91.0, stated("4", 100))) == "-9.0 %"
    assert difference(row(100.01, stated("4", 100))) == "0 %"
    assert difference(row(1, stated("4", 0))) == "not zero"
    assert difference(row(1)) == ""
    assert difference(replace(row(91.0, stated("4", 91)), is_fitted=True)) == "fitted"
    assert reasons([row(1), row(2), row(3, why="else")]) == ["because", "as above", "else"]


@pytest.mark.full
def test_json_has_every_number_and_no_infinity(computed):
    found = json.loads(json.dumps(as_json(computed), allow_nan=False))
    assert [part["id"] for part in found] == list(QUICK)
    first = found[0]["rows"][0]
    assert first["paper"] == {"low": 42, "high": 42, "place": "section 2.2"}
    bound = next(part for part in found if part["id"] == "gemini-f11")["rows"][0]
    assert bound["paper"]["high"] is None and bound["difference"] == 0


def sections(page: str) -> dict[str, str]:
    """Text by heading of the third level."""
    parts = re.split(r"^### (\S+)\n", re.sub(r"^## .*\n", "", page, flags=re.M), flags=re.M)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


@pytest.mark.full
def test_the_page_is_what_the_command_writes(computed):
    """Words to the letter, numbers to a percent: processors round differently."""
    published = sections(EVIDENCE.read_text(encoding="utf-8"))
    assert set(published) == set(FIGURES)
    for name, (figure, rows) in computed.items():
        now = sections(section(figure, rows))[name]
        assert NUMBER.sub("#", published[name]) == NUMBER.sub("#", now), f"{name}: run make evidence"
        for before, after in zip(NUMBER.findall(published[name]), NUMBER.findall(now), strict=True):
            pair = float(before.replace(",", "")), float(after.replace(",", ""))
            assert pair[0] == pytest.approx(pair[1], rel=0.01, abs=0.06), f"{name}: {before} is now {after}"


def test_the_page_counts_its_rows():
    """The table at its start, from the rows below it."""
    page = EVIDENCE.read_text(encoding="utf-8")
    head, *parts = re.split(r"^### (\w+)-\S+\n", page, flags=re.M)
    counted = {paper: [0, 0, 0, 0] for paper in PAPERS}
    for paper, text in zip(parts[::2], parts[1::2], strict=True):
        for _, claim, _, how, apart, _ in re.findall(r"^\|" + r" (.*?) \|" * 6 + "$", text, flags=re.M):
            if not re.search(r"\d", claim) or how == "arithmetic" or apart == "fitted":
                continue
            number = abs(float(apart.removesuffix(" %"))) if apart != "not zero" else math.inf
            counted[paper][0] += 1
            counted[paper][1 if number <= 1 else 2 if number <= 10 else 3] += 1
    written = {
        name: [int(each) for each in cells.split(" | ")]
        for name, cells in re.findall(r"^\| (\w+) \| (\d.*) \|$", head, flags=re.M)
    }
    assert counted == written


@pytest.mark.full
def test_the_page_names_its_command_and_counts_rows(computed):
    page = markdown(computed, "python -m benches.papers all --markdown page.md")
    assert page.startswith("# Evidence\n") and "\n    python -m benches.papers all --markdown page.md\n" in page
    counted = [
        [int(cell) for cell in line.split("|")[2:6]] for line in page.splitlines() if re.match(r"\| \w+ \| \d", line)
    ]
    assert len(counted) == len(PAPERS)
    assert all(total == sum(rest) for total, *rest in counted)
    assert "python -m benches.papers all --slow --markdown docs/evidence.md" in EVIDENCE.read_text(encoding="utf-8")


def test_the_command_shows_and_writes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["gemini-f9", "--json", "x.json", "--markdown", "x.md"]) == 0
    said = capsys.readouterr().out
    assert "93.33 %" in said and "wrote x.md" in said
    assert json.loads((tmp_path / "x.json").read_text())[0]["id"] == "gemini-f9"
    assert "python -m benches.papers gemini-f9 --json x.json --markdown x.md" in (tmp_path / "x.md").read_text()


def test_the_command_lists_every_figure(capsys):
    assert main([]) == main(["list"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in FIGURES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["gemini-f99"], "did you mean gemini-f9"),
        (["list", "gemini-f9"], "list: expected no other ID"),
        (["gemini-f9", "--json", "."], "--json .: cannot be written: Is a directory"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(words, message, capsys):
    assert main([*words]) == 2
    assert message in capsys.readouterr().err
