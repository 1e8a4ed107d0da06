"""Frozen weights in snapshots of a session: they are sent once, and again if a script writes them."""

import pytest

from support.frozen_parts import DIES_IN, STEPS, WRITTEN_AFTER, plain, train

OVERHEAD = 1024
"""Bytes of a member's messages for a version in addition to the state, at most: answers of those that hold copies."""


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "options", [{"preset": "gemini"}, {"preset": "baft"}, {"preset": "gemini", "shard_optimizer": True}]
)
def test_frozen_parts_are_sent_once_and_again_after_a_script_has_written_them(start, options):
    losses = plain()
    found, logs = start(train, "abc", hang_timeout=30.0, **options)
    for name in "ac":
        steps = {event["step"]: event for event in found[name] if event["event"] == "commit"}
        assert [*steps] == list(range(STEPS)), logs[name][-3000:]
        assert [event["loss"] for event in steps.values()] == pytest.approx(losses, abs=1e-5)
        recovered = [event for event in found[name] if event["event"] == "recovered"][-1]
        assert (recovered["members"], recovered["steps_lost"]) == (2, 0)
        assert [each["digests_mismatched"] for each in found[name] if each["event"] == "verified"] == [0]
        sizes = [each for each in steps[2]["sizes"] if each[2]]
        still = sum(still * peers for _, still, peers in sizes)
        others = sum((size - still) * peers for size, still, peers in sizes)
        copied = [steps[number]["copied"] for number in range(DIES_IN)]
        quiet, again = copied[WRITTEN_AFTER - 2] - copied[0], copied[-1] - copied[WRITTEN_AFTER - 2]
        assert quiet <= (WRITTEN_AFTER - 1) * (others + OVERHEAD), "no frozen weights"
        later = (DIES_IN - WRITTEN_AFTER + 2) * (others + OVERHEAD)
        assert still <= again <= 2 * still + later, "once more; twice where a copy was under way that had a part of it"
        assert still > 2 * others > 0
