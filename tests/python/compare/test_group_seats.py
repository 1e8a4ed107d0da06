"""Fixed expert-parallel groups that train after a loss: all cases of small jobs against what must hold."""

from __future__ import annotations

import itertools

from benches.compare.group_seats import Holding, seat


def job(workers=4, size=2, step=30, saved=0):
    return [Holding(worker, step, worker % size, f"1/{worker // size}", saved) for worker in range(workers)]


def test_group_that_loses_a_worker_is_dropped_and_the_other_continues():
    seating = seat(job()[:3], 2)
    assert (seating.ranks, seating.idle, seating.step) == ((0, 1), (2,), 30)
    assert not seating.sources and not seating.from_checkpoint


def test_one_who_joins_fills_the_group_and_gets_its_state_from_a_peer():
    seating = seat([*job()[:2], Holding(2, 30, 0), Holding(4, 0)], 2)
    assert seating.ranks == (0, 1, 2, 4)
    assert seating.sources == {4: 1}


def test_survivors_of_two_groups_form_one_if_they_have_all_experts():
    both = job()
    seating = seat([both[0], both[3]], 2)
    assert (seating.ranks, seating.step, dict(seating.sources)) == ((0, 3), 30, {})


def test_lost_experts_come_from_the_newest_checkpoint():
    both = job(saved=20)
    seating = seat([both[0], both[2]], 2)
    assert (seating.ranks, seating.step, seating.from_checkpoint) == ((0, 2), 20, True)
    begins_again = seat([job()[0], job()[2]], 2)
    assert (begins_again.step, begins_again.from_checkpoint) == (0, False)


def test_a_step_that_one_rank_alone_has_taken_is_not_gone_on_from():
    late = [Holding(0, 31, 0, "1/0"), Holding(1, 30, 1, "1/0"), Holding(2, 30, 0, "1/1"), Holding(3, 30, 1, "1/1")]
    seating = seat(late, 2)
    assert seating.step == 30
    assert seating.sources == {0: 2}


def test_every_loss_of_a_job_seats_each_worker_once_at_a_position_it_can_fill():
    for size, groups in ((1, 3), (2, 3), (3, 2), (4, 2)):
        workers = size * groups
        everybody = job(workers, size, step=7, saved=5)
        for left in itertools.product((False, True), repeat=workers):
            alive = [each for each, is_left in zip(everybody, left, strict=True) if is_left]
            if not alive:
                continue
            for came in ([], [Holding(workers, 0)]):
                check(alive + came, size)


def check(holdings, size):
    seating = seat(holdings, size)
    names = sorted([*seating.ranks, *seating.idle])
    assert names == sorted(each.worker for each in holdings)
    assert len(seating.ranks) == len(holdings) // size * size
    by_name = {each.worker: each for each in holdings}
    is_complete = all(any(each.has(position, 7) for each in holdings) for position in range(size))
    assert (seating.step, seating.from_checkpoint) == ((7, False) if is_complete else (5, True))
    for rank, worker in enumerate(seating.ranks):
        giver = seating.sources.get(worker, worker)
        assert seating.from_checkpoint or by_name[giver].has(rank % size, 7)
