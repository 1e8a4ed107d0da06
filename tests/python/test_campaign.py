"""The campaign of faults: a run finds its fault, and would say so if nothing did."""

from dataclasses import replace

from support.campaign import KINDS, LONG, Kind, run

KIND = KINDS["a moment of the optimizer"]


def test_a_fault_is_found_and_its_member_named(tmp_path):
    assert run(KIND, "auto", tmp_path) == (True, True, 0, [], "")


def test_a_fault_that_nothing_finds_is_missed(tmp_path):
    blind = replace(KIND, session={"on_corruption": "ignore"})
    assert run(blind, "auto", tmp_path)[:2] == (False, False)


def test_an_alarm_without_a_fault_of_its_kind_is_false(tmp_path):
    score = run(replace(KIND, alarm="slow_member"), "auto", tmp_path)
    assert not score.found
    assert score.false_alarms == ["corruption_found: b"]


def test_nothing_is_found_where_nothing_is_wrong(tmp_path):
    score = run(Kind("", steps=LONG), "lazarus", tmp_path)
    assert (score.false_alarms, score.problem) == ([], "")
