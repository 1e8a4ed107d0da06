"""Log lines of lost members and of recoveries."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from evermoe.events import Recovered
from evermoe.observe.recovery_log import log_recovery, recovery_line

JOIN = Recovered(
    started_at=0.0,
    seconds={"agree": 0.1, "rebuild": 0.25},
    step=7,
    steps_lost=0,
    members=3,
    reason="new members",
    fetched_bytes=0,
    fetched_units=0,
    sources={},
    digests_checked=0,
    digests_mismatched=0,
    lost_units=[],
)
MOVE = replace(JOIN, reason="the load has shifted")
FAILURE = replace(JOIN, failure="process", reason="rank 1 is lost")


@pytest.mark.parametrize(
    ("event", "level"), [(MOVE, logging.INFO), (JOIN, logging.WARNING), (FAILURE, logging.WARNING)]
)
def test_failures_and_joins_are_warnings_and_moves_are_not(event, level, caplog):
    with caplog.at_level(logging.INFO, "evermoe"):
        log_recovery(event)
    assert [record.levelno for record in caplog.records] == [level]


def test_the_line_says_that_members_have_joined():
    assert recovery_line(JOIN).startswith("new members have joined: training resumes at step 7 with 3 members")
    assert recovery_line(MOVE).startswith("training resumes")


def test_the_line_says_what_is_lost():
    assert "1 committed step lost" in recovery_line(replace(FAILURE, steps_lost=1))
    stale = replace(FAILURE, stale={"moe.experts.0": 5, "moe.experts.1": 6}, lost_tokens={"moe.experts.0": 1200})
    assert recovery_line(stale).endswith("2 experts went back to older copies: 1,200 tokens lost")
    restored = replace(FAILURE, steps_lost=3, lost_units=["moe.experts.0"])
    assert "no copy of 1 unit was left in memory: the state is a checkpoint's" in recovery_line(restored)
