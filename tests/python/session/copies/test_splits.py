"""`lazarus` splits tokens over replicas by its Algorithm 1, on placements of its own or on MRO: read from a run."""

from __future__ import annotations

import numpy as np
import pytest

from support.history import check_history
from support.splits import SplittingWorker

MEMBERS = 3


@pytest.mark.parametrize("placement", [None, "mro"])
def test_replicas_share_the_tokens_of_their_expert_evenly(start_job, placement):
    job = start_job(MEMBERS, preset="lazarus", placement=placement, rebalance_interval=0)
    workers = [job.start(name, kind=SplittingWorker, steps=4) for name in "abc"]
    assert [each.join() for each in workers] == [0] * MEMBERS
    check_history(workers)
    splits = [{event["rank"]: [] for event in each.events("split")} for each in workers]
    by_rank = {rank: each.events("split") for each, ranks in zip(workers, splits, strict=True) for rank in ranks}
    assert sorted(by_rank) == [*range(MEMBERS)]
    exchanges = [*zip(*(by_rank[rank] for rank in range(MEMBERS)), strict=True)]
    assert len(exchanges) >= 2 * 4, "two layers in each step"
    shared = 0
    for rows in exchanges:
        assert {row["policy"] for row in rows} == {"even"}
        tokens_EN, matrix_NE = np.array(rows[0]["tokens"]), np.array(rows[0]["matrix"])
        send_NEN = np.array([row["send"] for row in rows])
        assert (send_NEN.sum(2) == tokens_EN.T).all(), "no token is lost"
        exact_EN = (tokens_EN.sum(1) * matrix_NE / matrix_NE.sum(0)).T
        assert (abs(send_NEN.sum(0) - exact_EN) <= 1).all()
        stays_EN = np.minimum(tokens_EN, exact_EN)
        assert (abs(send_NEN[range(MEMBERS), :, range(MEMBERS)].T - stays_EN) <= 1).all(), "as many stay as fit"
        shared += int(((matrix_NE > 0).sum(0) > 1).sum())
    assert shared > 0, "some experts have replicas on several members"
