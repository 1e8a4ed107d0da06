"""Copies that no bubble has room for (W* of MoEtion's Algorithm 4) are sent during compute: real processes."""

from __future__ import annotations

import pytest

from support.pipelines import PRESETS, RANKS, Pipeline


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.long
def test_what_has_no_bubble_goes_beside_compute_with_moetion_and_before_the_vote_with_baft(start_job, preset):
    copies = PRESETS[preset] | {"profile_steps": 4, "copy_buffer_bytes": 1 << 9, "snapshot_interval": 1}
    pipeline = Pipeline(start_job(RANKS), copies=copies, steps=14, work=4)
    for rank in range(RANKS):
        pipeline.start(rank)
    done = pipeline.finish()
    assert [each["different"] for each in done] == [[]] * RANKS
    sent = [each.events("step")[-1]["sent"] for each in pipeline.ranks]
    assert all("have no window" in each.events("step")[-1]["summary"] for each in pipeline.ranks)
    if preset == "moetion":
        assert all(each["background"] > 0 for each in sent)
    else:
        assert all("background" not in each and each["vote"] > 0 for each in sent)
