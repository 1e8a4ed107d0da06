"""Errors of an agreement on the members that took too long: who has joined, who was refused, what to do."""

from __future__ import annotations

import pytest

from evermoe.comm.gathering import Gathering
from evermoe.comm.lighthouse import UNNAMED

CHECK = "Check that the Lighthouse runs"
START = "start {} more, or set the number of members that exist (--members, EVERMOE_MEMBERS)"
REFUSED = {"d": "batch_size is 12 here, 24 on the other worker"}


@pytest.mark.parametrize(
    ("needed", "named", "refused", "problem", "runs", "expected", "absent"),
    [
        (3, "", {}, "", False, ["within 2 s (Lighthouse http://x:1): it does not answer. Check that"], "members have"),
        (3, "", {}, "it hangs", False, ["it hangs. Check that the Lighthouse runs"], "it does not answer"),
        (3, "ab", {}, UNNAMED, True, ["2 of 3 members have joined (a, b); ", START.format(1)], UNNAMED),
        (3, "", {}, UNNAMED, True, ["0 of 3 members have joined (the Lighthouse answers)", START.format(3)], UNNAMED),
        (4, "abc", REFUSED, "", True, ["3 of 4 members have joined (a, b, c); d was refused: batch_size is 12"], CHECK),
        (4, "abc", REFUSED, "", True, ["all workers need the same script, options", START.format(1)], CHECK),
        (0, "ab", {}, "members disagree", True, ["(Lighthouse http://x:1): members disagree."], "start "),
    ],
    ids=["no Lighthouse", "a problem", "too few", "none", "refused", "refused, what to do", "all have joined"],
)
def test_a_timeout_says_who_is_missing_and_what_to_do(needed, named, refused, problem, runs, expected, absent):
    gathering = Gathering()
    gathering.note_refusal("earlier", "of the agreement before")
    gathering.begin_agreement(needed)
    gathering.note_members({each: {"role": "train"} for each in named} | {"y": {"role": "replica"}})
    gathering.note_members({})  # the largest set counts
    for who, why in refused.items():
        gathering.note_refusal(who, why)
    said = str(gathering.timeout_error(problem, 2, "http://x:1", lighthouse_runs=runs))
    assert said.startswith("no agreement on the members within 2 s")
    assert all(words in said for words in expected), said
    assert absent not in said
    assert "earlier" not in said


def test_a_doubt_about_secrets_is_named_once():
    gathering = Gathering()
    gathering.begin_agreement(2)
    gathering.doubt = "c claims to be of job 'job', but it has an EVERMOE_SECRET, this worker has none"
    for problem in ("", gathering.doubt):
        said = str(gathering.timeout_error(problem, 2, "http://x:1", lighthouse_runs=True))
        assert said.count(gathering.doubt) == 1
