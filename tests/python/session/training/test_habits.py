"""Habits of people who train: each equals plain training in one process, through a death, or is refused by name."""

import gc
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import evermoe
from evermoe.errors import UnsupportedState
from support.habits import (
    DATA,
    DIES_IN,
    HABITS,
    STEPS,
    Model,
    cross_entropy,
    elastic,
    mean_loss,
    plain,
)
from support.own_steps import stray_hook
from support.refused_habits import (
    as_many_forwards_as_samples,
    counts_on_one,
    noisy_optimizer,
    one_backward_less,
    own_buffer,
    own_sharded_optimizer,
)


@pytest.mark.parametrize(
    ("habit", "names"),
    [(habit, "abc") for habit in HABITS]
    + [(habit, "abr") for habit in ("12: readers that end", "9: GradScaler", "14: tokens that are not padding")],
)
@pytest.mark.few(4)
def test_equals_plain_training_through_a_death(start, habit, names):
    """`r` is a replica node, which computes no loss and repeats the steps from the gradients."""
    expected = plain(habit)
    found, logs = start(elastic, names, habit)
    assert [event["digests_mismatched"] for event in found[names[-1]] if event["event"] == "verified"] == [0], logs
    survivors = names.translate({ord("b"): None, ord("r"): None})
    for name in survivors:
        steps = [event for event in found[name] if event["event"] == "commit"]
        assert [event["step"] for event in steps] == list(range(STEPS)), logs[name][-3000:]
        for event, values in zip(steps, expected, strict=True):
            for key, value in values.items():
                assert event[key] == pytest.approx(value, abs=HABITS[habit].tolerance, rel=1e-6), (event, values)
        recovered = [event for event in found[name] if event["event"] == "recovered"][-1]
        assert (recovered["step"], recovered["members"], recovered["steps_lost"]) == (DIES_IN, len(survivors), 0)
        assert recovered["digests_mismatched"] == 0
        verified = [event for event in found[name] if event["event"] == "verified"]
        assert [event["digests_mismatched"] for event in verified] == [0]
    if "scale" in expected[0]:
        assert len({values["scale"] for values in expected}) == 2


def failures(found):
    return [event for events in found.values() for event in events if event["event"] == "failed"]


@pytest.mark.parametrize(
    ("script", "names", "session", "error", "words"),
    [
        (noisy_optimizer, "ab", {"preset": "gemini"}, "UnsupportedState", "head/bias differs between ranks 0 and 1"),
        (own_sharded_optimizer, "ab", {}, "UnsupportedState", "embedding/weight differs between ranks 0 and 1"),
        (stray_hook, "ab", {"preset": "gemini"}, "UnsupportedState", "head/bias differs between ranks 0 and 1"),
        (counts_on_one, "abc", {}, "ValueError", "2 of 3 members gave count, the others did not"),
        (one_backward_less, "ab", {"hang_timeout": 1.0}, "UnequalForwards", "with as many forwards of each layer"),
        (
            as_many_forwards_as_samples,
            "abc",
            {"hang_timeout": 1.0},
            "UnequalForwards",
            r"^step 0: rank \d on \w ran 4 forwards of layer first.experts, rank \d on \w ran 3\. "
            r"(?s:.)*`for part in step.micro_batches\(n\)`",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.few(2)
def test_what_members_do_otherwise_is_refused_on_all(start, script, names, session, error, words):
    """In the first step, and soon; a hook that changes replicas only later is found later in the run."""
    began = time.monotonic()
    found, logs = start(script, names, **session)
    assert time.monotonic() - began < 20
    assert [each["error"] for each in failures(found)] == [error] * len(names), logs
    for each in failures(found):
        assert re.search(words, each["message"])


def test_what_belongs_to_a_rank_is_named_in_the_first_step(start):
    """A persistent buffer, a part of the experts in `state_dict`, and an average and a copy of them."""
    found, logs = start(own_buffer, "abc")
    assert not failures(found), logs
    text = "".join(logs.values())
    assert "buffer model/seen differs between ranks 0 and 1" in text
    assert "scratch differs" not in text
    for events in found.values():
        clipped, warned, averaged, copied = events
        assert any("gradients were changed in `with step:` after" in each for each in clipped["warnings"])
        assert re.match(r"state_dict\(\) has \d of the 6 experts of layer first.experts", warned["warnings"][0])
        assert "evermoe.optim.EMA(optimizer)" in averaged["message"]
        assert re.match(
            r"expected a layer with all its 6 experts to copy or pickle, got one with \d", copied["message"]
        )


# ---- refused in one process


def session_of(model, tmp_path, **options):
    sampler = evermoe.ElasticSampler(len(DATA), 12)
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return evermoe.Session(
        model, optimizer, sampler, membership=evermoe.Membership(memory_dir=str(tmp_path)), **options
    )


@pytest.fixture
def one_process():
    """A process group of torch's own, with one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def fully_shard_first(model):
    fully_shard(model.embedding, mesh=init_device_mesh("cpu", (1,)))
    return model


def distribute_head(model):
    mesh = init_device_mesh("cpu", (1,))
    model.head.weight = torch.nn.Parameter(distribute_tensor(model.head.weight.data, mesh, [Shard(0)]))
    return model


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (DistributedDataParallel, "DistributedDataParallel, at the top of the model, reduces gradients"),
        (
            lambda model: torch.nn.Sequential(DistributedDataParallel(model)),
            "at 0 of the model, reduces",
        ),
        (fully_shard_first, "FSDPModule, at embedding of the model, reduces gradients"),
        (distribute_head, "parameter head.weight is a DTensor"),
        (torch.optim.swa_utils.AveragedModel, "AveragedModel, at the top of the model, would be trained"),
    ],
    ids=["DDP", "DDP inside", "FSDP2", "DTensor", "AveragedModel"],
)
def test_wrappers_are_refused_by_name(tmp_path, wrap, words):
    with pytest.raises(UnsupportedState, match=words):
        session_of(wrap(Model()), tmp_path)


@pytest.mark.usefixtures("one_process")
def test_zero_redundancy_optimizer_is_refused_by_name(tmp_path):
    model = Model()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    with pytest.raises(UnsupportedState, match="ZeroRedundancyOptimizer steps a part of the parameters"):
        session_of(model, tmp_path, optimizer=optimizer)


def test_average_that_was_made_before_the_session_is_refused_by_name(tmp_path):
    model = Model()
    average = torch.optim.swa_utils.AveragedModel(model)
    with pytest.raises(UnsupportedState, match="AveragedModel of this model exists"):
        session_of(model, tmp_path)
    del average
    gc.collect()
    session_of(model, tmp_path).close()


def test_scaler_with_parameters_in_float16_is_refused(tmp_path):
    with pytest.raises(UnsupportedState, match=r"float16, which parameter embedding.weight has"):
        session_of(Model().half(), tmp_path, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=r"expected scaler to be a torch.amp.GradScaler, got 5"):
        session_of(Model(), tmp_path, scaler=5)


def test_scale_that_cannot_shrink_any_more_ends_the_job(tmp_path):
    model, scaler = Model(), torch.amp.GradScaler("cpu", 4.0)
    session = session_of(model, tmp_path, scaler=scaler)
    with pytest.raises(evermoe.errors.NonFiniteLoss, match="step 2"):
        for step in session.steps(9):
            with step:
                step.backward(mean_loss(model, DATA[step.indices]) * float("inf"))
    assert (scaler.get_scale(), session.skipped, session.step) == (1.0, 2, 2)


def test_scaler_that_is_off_changes_nothing(tmp_path):
    losses = []
    for scaler in (None, torch.amp.GradScaler("cpu", enabled=False)):
        model = Model()
        session = session_of(model, tmp_path, scaler=scaler)
        for step in session.steps(3):
            with step:
                step.backward(mean_loss(model, DATA[step.indices]))
        losses.append(session.loss)
    assert losses[0] == losses[1]


@pytest.mark.parametrize("count", [-1, float("nan"), float("inf"), "5", torch.ones(2)])
def test_count_that_is_no_number_is_named(tmp_path, count):
    model = Model()
    with pytest.raises(ValueError, match="expected count to be a number of 0 or more"):
        for step in session_of(model, tmp_path).steps(1):
            with step:
                step.backward(mean_loss(model, DATA[step.indices]), count=count)


def test_nothing_counted_is_not_finite(tmp_path):
    model = Model()
    with pytest.raises(evermoe.errors.NonFiniteLoss):
        for step in session_of(model, tmp_path).steps(1):
            with step:
                step.backward(cross_entropy(model, DATA[step.indices], reduction="sum"), count=0)


def test_count_in_some_calls_of_a_step_is_refused(tmp_path):
    model = Model()
    with pytest.raises(ValueError, match="count was given in some calls"):
        for step in session_of(model, tmp_path).steps(1):
            with step:
                for part in step.micro_batches(2):
                    loss = cross_entropy(model, DATA[part])
                    step.backward(loss, count=None if part[0] == step.indices[0] else 6)


def test_more_micro_batches_than_samples_change_nothing(tmp_path):
    losses = []
    for n in (1, 12, 30):
        model = Model()
        for step in (session := session_of(model, tmp_path)).steps(3):
            with step:
                parts = [(step.weight, part.tolist()) for part in step.micro_batches(n)]
                assert len(parts) == n and step.weight == 1
                assert sum(weight for weight, _ in parts) == pytest.approx(1)
                assert sorted({i for _, part in parts for i in part}) == sorted(step.indices.tolist())
                for part in step.micro_batches(n):
                    step.backward(cross_entropy(model, DATA[part]))
        losses.append(session.loss)
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)


def test_micro_batches_need_a_number(tmp_path):
    with pytest.raises(ValueError, match="expected n to be a whole number, >= 1, got 0"):
        for step in session_of(Model(), tmp_path).steps(1):
            with step:
                list(step.micro_batches(0))
