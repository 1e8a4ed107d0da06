"""The sampler: every sample of the endless sequence once, in order, with any members."""

import json
import random

import pytest
import torch

from evermoe import ElasticSampler


def consume(sampler, sizes):
    """One batch per membership size; returns the samples used, in order."""
    used = []
    for size in sizes:
        for rank in range(size):
            share = sampler.share(rank, size)
            assert share.indices.dtype == torch.int64
            used += share.indices.tolist() if share.weight > 0 else []
        sampler.advance()
    return used


@pytest.mark.parametrize("seed", range(20))
def test_any_sequence_of_memberships_repeats_and_skips_nothing(seed):
    draw = random.Random(seed)
    samples, batch = draw.randint(1, 50), draw.randint(1, 60)
    sizes = [draw.randint(1, 12) for _ in range(30)]
    changing = consume(ElasticSampler(samples, batch, seed=seed), sizes)
    alone = consume(ElasticSampler(samples, batch, seed=seed), [1] * 30)
    assert changing == alone
    for start in range(0, len(changing) - samples + 1, samples):
        assert sorted(changing[start : start + samples]) == list(range(samples))


def test_a_billion_samples_in_order_take_no_memory():
    sampler = ElasticSampler(10**9, 4, shuffle=False)
    sampler.consumed = 10**9 - 2
    assert sampler.batch().tolist() == [10**9 - 2, 10**9 - 1, 0, 1]
    sampler.advance()
    sampler.change(num_samples=10**9 + 5)
    assert [sampler.batch().tolist() for sampler.consumed in (2 * 10**9 - 2,)] == [[10**9 - 2, 10**9 - 1, 0, 1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_samples": 0}, "expected num_samples to be a whole number, >= 1, got 0"),
        ({"batch_size": 1.5}, "batch_size"),
        ({"shuffle": "no"}, "shuffle"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ElasticSampler(**{"num_samples": 8, "batch_size": 4} | arguments)


@pytest.mark.parametrize(("batch", "size"), [(8, 3), (7, 7), (5, 8), (1, 4), (12, 1)])
def test_shares_are_even_and_their_weights_sum_to_one(batch, size):
    shares = [ElasticSampler(100, batch).share(rank, size) for rank in range(size)]
    assert sum(share.weight for share in shares) == pytest.approx(1)
    counts = [round(share.weight * batch) for share in shares]
    assert max(counts) - min(counts) <= 1
    assert all(len(share.indices) == max(count, 1) for share, count in zip(shares, counts, strict=True))


def test_shares_of_any_proportions_have_each_sample_once():
    draw = random.Random(0)
    for _ in range(300):
        size, batch = draw.randint(1, 9), draw.randint(1, 40)
        sampler = ElasticSampler(100, batch, shuffle=False)
        sampler.proportions = [draw.choice([0.25, draw.random() + 0.01, 1.0]) for _ in range(size)]
        shares = [sampler.share(rank, size) for rank in range(size)]
        used = [each.indices for each in shares if each.weight]
        assert torch.cat(used).tolist() == list(range(batch))
        assert sum(each.weight for each in shares) == pytest.approx(1.0)
        total = sum(sampler.proportions)
        assert all(abs(s.weight - p / total) <= 1 / batch for s, p in zip(shares, sampler.proportions, strict=True))


def test_example_of_the_documentation():
    sampler = ElasticSampler(8, 8, shuffle=False)
    assert [sampler.share(rank, 3).indices.tolist() for rank in range(3)] == [[0, 1], [2, 3, 4], [5, 6, 7]]


def test_a_batch_stays_until_it_is_counted_as_consumed():
    sampler = ElasticSampler(10, 4)
    first = sampler.batch()
    assert torch.equal(sampler.batch(), first)
    sampler.advance()
    assert not torch.equal(sampler.batch(), first)


def test_each_epoch_is_shuffled_by_the_seed():
    def epochs(seed):
        used = consume(ElasticSampler(40, 40, seed=seed), [1, 1])
        return used[:40], used[40:]

    first, second = epochs(0)
    assert first != second
    assert epochs(0) == (first, second)
    assert epochs(1)[0] != first
    assert consume(ElasticSampler(5, 5, shuffle=False), [1, 2]) == [0, 1, 2, 3, 4] * 2


def test_a_batch_may_be_larger_than_the_data():
    used = consume(ElasticSampler(3, 8), [2])
    assert len(used) == 8
    assert sorted(used[:3]) == sorted(used[3:6]) == [0, 1, 2]


def test_state_is_plain_and_goes_through_json():
    sampler = ElasticSampler(10, 4, seed=3)
    consume(sampler, [1, 2, 3])
    state = json.loads(json.dumps(sampler.state_dict()))
    assert len(json.dumps(state)) < 200
    again = ElasticSampler(10, 4, seed=3)
    again.load_state_dict(state)
    assert again.state_dict() == sampler.state_dict()
    assert torch.equal(again.batch(), sampler.batch())


def test_another_batch_size_continues_with_the_next_sample():
    sampler = ElasticSampler(10, 4)
    used = consume(sampler, [1])
    larger = ElasticSampler(10, 6)
    larger.load_state_dict(sampler.state_dict())
    assert sorted(used + consume(larger, [1])) == list(range(10))


def resumed(sampler, **others):
    """A sampler of a script that is started again with other arguments."""
    again = ElasticSampler(**sampler._given | others)
    again.load_state_dict(json.loads(json.dumps(sampler.state_dict())))
    return again


@pytest.mark.parametrize("in_a_new_process", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_changes_repeat_and_skip_nothing(seed, in_a_new_process):
    draw = random.Random(seed)
    settings = {"num_samples": draw.randint(1, 30), "batch_size": draw.randint(1, 20), "shuffle": seed % 3 > 0}
    sampler = ElasticSampler(**settings, seed=seed)
    left = set(range(sampler.num_samples))
    for _ in range(40):
        for sample in consume(sampler, [draw.randint(1, 4) for _ in range(draw.randint(0, 2))]):
            left = left or set(range(sampler.num_samples))
            left.remove(sample)
        others = {"num_samples": draw.randint(1, 30), "batch_size": draw.randint(1, 20)}
        others |= {"shuffle": draw.random() < 0.5, "seed": draw.randint(0, 2)}
        others = {name: value for name, value in others.items() if draw.random() < 0.4}
        if in_a_new_process:
            sampler = resumed(sampler, **others)
        else:
            sampler.change(**others)
            assert resumed(sampler).batch().tolist() == sampler.batch().tolist()
        left &= set(range(sampler.num_samples))


def test_an_epoch_is_finished_in_its_order_with_the_samples_that_exist():
    complete, sampler = ElasticSampler(20, 20, seed=1), ElasticSampler(20, 4, seed=1)
    first = complete.batch().tolist()
    assert consume(sampler, [1, 1]) == first[:8]
    sampler.change(num_samples=10, seed=2)
    rest = [sample for sample in first[8:] if sample < 10]
    following = ElasticSampler(10, 10, seed=2)
    following.consumed = 10
    sampler.change(batch_size=len(rest) + 10)
    assert consume(sampler, [1]) == rest + following.batch().tolist()


def test_a_wrong_change_changes_nothing():
    sampler = ElasticSampler(10, 4)
    before = sampler.state_dict()
    with pytest.raises(ValueError, match="batch_size"):
        sampler.change(num_samples=5, batch_size=0)
    assert sampler.state_dict() == before


def test_other_arguments_at_a_resume_are_named_once_and_count_from_there_on(caplog):
    sampler = ElasticSampler(10, 4)
    sampler.change(batch_size=2)  # in mid-run: the script that resumes does not undo it
    consume(sampler, [1])
    again = resumed(sampler, num_samples=12)
    assert (again.batch_size, again.num_samples) == (2, 12)
    assert "num_samples was 10 where its state was taken, and is 12 now" in caplog.text
    caplog.clear()
    assert resumed(again).state_dict() == again.state_dict()
    assert resumed(again, batch_size=5).batch_size == 5
    assert not caplog.text


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0)])
def test_wrong_ranks(rank, size):
    with pytest.raises(ValueError, match=f"rank={rank}, size={size}"):
        ElasticSampler(10, 4).share(rank, size)


def test_a_change_while_a_batch_is_used_counts_from_the_next_one_on():
    sampler = ElasticSampler(100, 10, shuffle=False)
    used = sampler.batch().tolist()
    sampler.change(batch_size=20)
    sampler.advance()
    assert used + sampler.batch().tolist() == list(range(30))
