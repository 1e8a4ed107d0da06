"""`python -m benches.papers`: the registry, what is said of each number, the page, the command."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

from benches.papers.__main__ import main
from benches.papers.evidence import as_json, difference, markdown, section
from benches.papers.figure import PAPERS, How, Outcome, Row, change, quotient, reasons, stated
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
        "pec-algorithm1",
        "lazarus-theorem1",
        "baft-algorithm2",
        "moetion-algorithm2",
    }
    assert "gemini-corollary1" not in errors  # its proof claims a bound for f >= 2k


def test_what_is_not_computed_says_so():
    for figure in FIGURES.values():
        if figure.rows is list:
            assert "ot stated in our copy" in figure.note, figure.id


@pytest.mark.full
def test_every_row_has_numbers_a_way_and_a_reason(computed):
    for figure, rows in computed.values():
        assert rows or figure.rows is list, figure.id
        for row in rows:
            assert row.quantity and row.why and row.how in get_args(How), row
            assert row.how != "real run", row
            assert row.ours is None or math.isfinite(row.ours), row
            assert row.paper is not None or row.difference is None
            assert row.outcome in get_args(Outcome), row


FITTED = {
    "gemini-eq1": 3,
    "gemini-f12": 2,
    "gemini-f16": 2,
    "pec-f2b": 1,
    "pec-f5a": 2,
    "pec-f5b": 3,
    "lazarus-t2": 2,
}
"""Rows by figure that have an assumption chosen for their number."""


@pytest.mark.full
def test_fitted_rows_are_those_with_an_assumption_chosen_for_their_number(computed):
    fitted = {name: sum(row.is_fitted for row in rows) for name, (_, rows) in computed.items()}
    assert {name: number for name, number in fitted.items() if number} == FITTED
    for name in FITTED:
        for row in computed[name][1]:
            if row.is_fitted and row.paper.is_value:
                assert abs(row.difference) < 0.1, row  # a fit that misses is no fit


@pytest.mark.full
def test_a_number_that_is_left_out_has_its_reason_in_the_row(computed):
    left_out = [row for _, rows in computed.values() for row in rows if row.how == "not computed"]
    assert left_out
    for row in left_out:
        assert re.search(r"does not state|state neither|measure|states? |has ", row.why), row


@pytest.mark.full
def test_products_of_the_papers_numbers_are_arithmetic(computed):
    """The same kind of number has the same label: none of these uses a planner, or a size of the papers' models."""
    for start in (
        "checkpoint of GPT-2 100B on each",
        "full checkpoint of MoE-GPT-1.6B-64E",
        "its checkpoint with 6",
        "stall of CheckFreq",
        "time of Gemini's copies",
        "wasted time of CheckFreq",
        "bytes of a state over",
        "transfer of these replicas",
        "weights and optimizer state of an expert",
        "time to send a server's part",
    ):
        found = [row.how for _, rows in computed.values() for row in rows if row.quantity.startswith(start)]
        assert found and set(found) == {"arithmetic"}, start


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


def test_quotients_and_changes_show_the_numbers_that_the_text_states():
    assert str(quotient("6.2", 45, 34)) == "1.324 = 45 / 34"
    assert quotient("6.2", 45, 34).with_unit("×") == "1.324 × = 45 / 34"
    band = change("3.1", 4.8851, 4.8808, 4.8854)
    assert band.with_unit("%") == "-0.08802 to 0.006141 % = 4.8808 to 4.8854 against 4.8851"
    assert band.difference(0.0) == 0 and band.difference(0.26) > 10  # as a ratio, 1.0026 would be within 1 % of 1.00006
    assert change("3.2", 2.8861, 2.8892).is_value


def test_a_row_without_our_number_says_so_and_has_one_of_the_paper():
    open_row = {"quantity": "q", "unit": "", "why": "because"}
    for bad in (
        {"paper": stated("4", 1), "ours": None, "how": "exact"},
        {"paper": stated("4", 1), "ours": 1.0, "how": "not computed"},
    ):
        with pytest.raises(ValueError, match="expected a number, or how='not computed' without one"):
            Row(**open_row, **bad)
    for bad in ({"ours": None, "how": "not computed"}, {"ours": 1.0, "how": "exact", "is_fitted": True}):
        with pytest.raises(ValueError, match="expected a number of the paper"):
            Row(**open_row, **bad, paper=None)


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


def test_each_row_has_one_outcome():
    missing = replace(row(1, stated("4", 100)), ours=None, how="not computed")
    outcomes = [
        (row(1), "not stated"),
        (missing, "not computed"),
        (replace(row(100, stated("4", 100)), is_fitted=True), "fitted"),
        (row(100, stated("4", at_least=90)), "bound holds"),
        (row(89.5, stated("4", at_least=90)), "within 1 %"),
        (row(101, stated("4", 100)), "within 1 %"),
        (row(91, stated("4", 100)), "within 10 %"),
        (row(89, stated("4", 100)), "further"),
        (row(1, stated("4", 0)), "further"),
    ]
    assert [each.outcome for each, _ in outcomes] == [expected for _, expected in outcomes]
    assert set(get_args(Outcome)) == {expected for _, expected in outcomes}
    assert difference(missing) == "" and difference(row(100, stated("4", at_least=90))) == "holds"


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
    assert first["paper"] == {"low": 42, "high": 42, "place": "section 2.2", "terms": ""}
    assert first["outcome"] == "fitted" and found[0]["id"] == "gemini-eq1"
    left_out = next(part for part in found if part["id"] == "gemini-f7")["rows"][0]
    assert left_out["ours"] is None and left_out["outcome"] == "not computed"
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


def counted(page: str) -> tuple[dict[str, Counter], dict[str, Counter]]:
    """Outcomes by paper and by way, read from the rows of a page alone."""
    by_paper: dict[str, Counter] = {"all": Counter()}
    by_how: dict[str, Counter] = {}
    parts = re.split(r"^### (\w+)-\S+\n", page, flags=re.M)
    for paper, text in zip(parts[1::2], parts[2::2], strict=True):
        for _, claim, _, how, apart, _ in re.findall(r"^\|" + r" (.*?) \|" * 6 + "$", text, flags=re.M):
            if how == "how":
                continue
            if not claim or how == "not computed":
                outcome = "not computed" if claim else "not stated"
            elif apart in ("fitted", "holds"):
                outcome = {"fitted": "fitted", "holds": "bound holds"}[apart]
            else:
                number = abs(float(apart.removesuffix(" %"))) if apart != "not zero" else math.inf
                outcome = "within 1 %" if number <= 1 else "within 10 %" if number <= 10 else "further"
            for counts, name in ((by_paper, paper), (by_paper, "all"), (by_how, how)):
                counts.setdefault(name, Counter())[outcome] += 1
    return by_paper, by_how


def check_summary(page: str) -> None:
    """Compare the tables at the start of a page with its rows: all are counted, once each."""
    head = page[: page.index("\n### ")]
    by_paper, by_how = counted(page)
    tables = {
        name.strip(): [int(cell) for cell in cells.split("|")]
        for name, cells in re.findall(r"^\|([^|]+)\| (\d[\d |]*) \|$", head, flags=re.M)
    }
    expected = {
        name: [counts.total(), *(counts[outcome] for outcome in get_args(Outcome))]
        for name, counts in (by_paper | by_how).items()
    }
    assert tables == expected
    assert sum(found[0] for name, found in tables.items() if name in get_args(How)) == tables["all"][0]


def test_the_page_counts_its_rows():
    """The tables at its start, from the rows below them; arithmetic and fitted ones are counted, too."""
    page = EVIDENCE.read_text(encoding="utf-8")
    check_summary(page)
    with pytest.raises(AssertionError):
        check_summary(page.replace("| arithmetic |", "| exact |", 2))


@pytest.mark.full
def test_the_page_names_its_command_and_counts_rows(computed):
    page = markdown(computed, "python -m benches.papers all --markdown page.md")
    assert page.startswith("# Evidence\n") and "\n    python -m benches.papers all --markdown page.md\n" in page
    check_summary(page)
    assert counted(page)[0]["all"].total() == sum(len(rows) for _, rows in computed.values())
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
