"""Messages of others at the Lighthouse: members that differ are refused with the difference, strangers ignored."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import evermoe
from evermoe._native import PROTOCOL
from evermoe.comm.messages import Identity, Messages
from support.messages import told
from support.optimizers import make_optimizer, make_scheduler
from support.worker import SAMPLES, Model

ADDRESS = "http://127.0.0.1:9"
"""Of a Lighthouse that is never asked."""
STEPS = 30


def identity_of_session(
    folder, *, optimizer="adamw", lr=None, schedule=None, batch_size=12, shuffle=True, deferred=False, **options
):
    """Return what a session of the tests' worker says of itself."""
    with evermoe.deferred(device="cpu") if deferred else contextlib.nullcontext():
        model = Model()
    stepper = make_optimizer(optimizer, model)
    for group in stepper.param_groups:
        group["lr"] = group["lr"] if lr is None else lr
    membership = {"lighthouse": ADDRESS, "job": "job", "memory_dir": str(folder)} | options.pop("membership", {})
    session = evermoe.Session(
        model,
        stepper,
        evermoe.ElasticSampler(SAMPLES, batch_size, shuffle=shuffle),
        scheduler=make_scheduler(schedule, stepper),
        membership=evermoe.Membership(**membership),
        **options,
    )
    session.close()
    return session._membership.identity


def identity_of_rank(folder, *, scaler=None, **membership):
    """Return what a rank of a pipeline says of itself."""
    module = nn.Linear(2, 2)
    session = evermoe.PipelineSession(
        module,
        torch.optim.SGD(module.parameters()),
        lambda session: None,
        stage=0,
        stages=2,
        scaler=scaler,
        membership=evermoe.Membership(lighthouse=ADDRESS, job="job", memory_dir=str(folder), **membership),
    )
    session.close()
    return session._membership.identity


def refusal(own, other, own_steps=STEPS, steps=STEPS):
    """Return why a process that is new is refused by an established member; empty if it is not."""
    member, newcomer = (Messages(name, each, ADDRESS, None) for name, each in (("a", other), ("c", own)))
    said = {"a": told(member, 3, steps), "c": told(newcomer, 0, own_steps, is_established=False)}
    named = [SimpleNamespace(replica_id=name, data=data) for name, data in said.items()]
    try:
        assert [each.id for each in newcomer.read_members(named, is_established=False, steps=own_steps)] == ["a", "c"]
    except ValueError as error:
        return str(error)
    return ""


SESSIONS = [
    ({"optimizer": "sgd"}, "this worker's model or optimizer differs from that of a in job 'job': their units"),
    ({"placement": evermoe.Placement(expert_slots=5)}, ": placement.expert_slots is 5 here, None on the other worker."),
    ({"batch_size": 8}, ": batch_size is 8 here, 12 on the other worker. Start"),
    ({"shuffle": False}, ": shuffle is False here, True on the other worker. Start"),
    ({"schedule": "cosine"}, "scheduler is torch.optim.lr_scheduler.CosineAnnealingLR here, None on the other worker"),
    ({"optimizer": "evermoe"}, "arithmetic is evermoe here, torch_cpu_fused on the other worker"),
    ({"lr": 0.1}, ": optimizer's lr is 0.1 here, 0.01 on the other worker. Start"),
    ({"shard_optimizer": True}, "shard_optimizer is True here, False on the other worker"),
    ({"deferred": True}, "first weights is "),
    ({"membership": {"lighthouse": f"{ADDRESS},http://127.0.0.1:10"}}, "lighthouses is several here, one on the"),
    (
        {"membership": {"job": "another"}},
        "this worker belongs to job 'another': start one Lighthouse for each job",
    ),
]


def test_sessions_that_differ_are_refused_with_the_difference(tmp_path):
    member = identity_of_session(tmp_path)
    assert refusal(identity_of_session(tmp_path), member) == ""
    for options, message in SESSIONS:
        own = identity_of_session(tmp_path, **options)
        assert message in refusal(own, member)
        assert not own.is_same(as_report(member)) and own.reason_against(as_report(member))


def as_report(identity):
    """Return a member's message as others have decoded it."""
    (report,) = Messages("b", identity, ADDRESS, None).read_members(
        [SimpleNamespace(replica_id="a", data=told(Messages("a", identity, ADDRESS, None), 3))], is_established=True
    )
    return report


def test_of_a_new_job_the_one_that_differs_from_most_is_refused_and_the_others_meet(tmp_path):
    usual, other = identity_of_session(tmp_path), identity_of_session(tmp_path, batch_size=8)
    messages = {name: Messages(name, other if name == "a" else usual, ADDRESS, None) for name in "abc"}

    def meet(name, names):
        said = {each: told(messages[each], 0, STEPS, is_established=False) for each in names}
        named = [SimpleNamespace(replica_id=each, data=data) for each, data in said.items()]
        return [each.id for each in messages[name].read_members(named, is_established=False, steps=STEPS, needed=3)]

    with pytest.raises(ValueError, match=": batch_size is 8 here, 12 on the other worker"):
        meet("a", "abc")
    assert meet("b", "abc") == meet("c", "abc") == ["b", "c"]
    with pytest.raises(ConnectionError):  # members are missing, and there is no majority
        meet("a", "ab")


def test_an_established_member_counts_more_than_a_majority_of_new_ones(tmp_path):
    usual, other = identity_of_session(tmp_path), identity_of_session(tmp_path, batch_size=8)
    messages = {name: Messages(name, usual if name == "a" else other, ADDRESS, None) for name in "abc"}
    said = {name: told(each, 3, is_established=name == "a") for name, each in messages.items()}
    named = [SimpleNamespace(replica_id=name, data=data) for name, data in said.items()]
    with pytest.raises(ValueError, match="this worker differs from a in job 'job': batch_size is 8 here, 12 on the"):
        messages["b"].read_members(named, is_established=False, needed=3)
    assert [each.id for each in messages["a"].read_members(named, is_established=True)] == ["a"]


def test_another_version_of_the_package_is_refused(tmp_path, monkeypatch):
    member = identity_of_session(tmp_path)
    folder = tmp_path / "packages" / "evermoe-99.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text("Name: evermoe\nVersion: 99.0\n")
    monkeypatch.syspath_prepend(folder.parent)
    assert ": evermoe is 99.0 here, " in refusal(identity_of_session(tmp_path), member)


def test_loops_of_another_length_are_refused_where_both_have_one(tmp_path):
    member = identity_of_session(tmp_path)
    assert refusal(member, member, 40) == (
        "this worker's loop is session.steps(40), that of a in job 'job' is session.steps(30): all workers' must be "
        "the same"
    )
    assert refusal(member, member, 0) == refusal(member, member, 40, 0) == ""


def test_ranks_that_differ_are_refused_with_the_difference(tmp_path):
    member = identity_of_rank(tmp_path)
    assert refusal(identity_of_rank(tmp_path), member) == ""
    with_hook = identity_of_rank(tmp_path, on_lost="true")
    assert "on_lost is given here, missing on the other worker" in refusal(with_hook, member)
    with_scaler = identity_of_rank(tmp_path, scaler=torch.amp.GradScaler("cpu"))
    assert "scaler is growth_factor 2.0, backoff_factor 0.5" in refusal(with_scaler, member)
    assert "scaler is missing here" in refusal(member, with_scaler)


HALF = {"layout": "5e", "options": {}, "arithmetic": "", "job": "other", "standing": {}}
"""Some of the fields that members send."""
STRANGE = {
    "nothing": None,
    "half": HALF,
    "empty": {"evermoe": PROTOCOL, "job": "any", "established": True, "message": "{}"},
    "newer": {"evermoe": PROTOCOL + 1, "job": "another", "established": True},
    "nonsense": {"evermoe": [], "message": {"evermoe": {}}},
    "odd": {"\ud800": 1},
}


@pytest.mark.parametrize("is_established", [False, True])
def test_messages_of_strangers_are_ignored_with_one_warning_each(caplog, is_established):
    deep = {}
    for _ in range(100_000):
        deep = {"message": deep}
    messages = Messages("a", Identity("job", "layout"), ADDRESS, None)
    strange = [SimpleNamespace(replica_id=f"0-{name}", data=data) for name, data in (STRANGE | {"deep": deep}).items()]
    for _ in range(2):
        members = [*strange, SimpleNamespace(replica_id="a", data=told(messages, 3))]
        assert [each.id for each in messages.read_members(members, is_established=is_established)] == ["a"]
    warned = sorted(record.getMessage().split(":")[0] for record in caplog.records)
    assert warned == sorted(f"ignoring '0-{name}' at the Lighthouse" for name in [*STRANGE, "deep"])


def test_a_new_member_of_another_protocol_than_the_job_is_refused_and_the_job_ignores_one(caplog):
    other = {"evermoe": PROTOCOL + 1, "job": "job", "established": True, "new": {}}
    messages = Messages("a", Identity("job", "layout"), ADDRESS, None)
    members = [SimpleNamespace(replica_id="0-old", data=other), SimpleNamespace(replica_id="a", data=told(messages, 3))]
    with pytest.raises(
        ValueError, match=f"speaks protocol {PROTOCOL} and that of 0-old in job 'job' protocol {PROTOCOL + 1}"
    ):
        messages.read_members(members, is_established=False)
    assert [each.id for each in messages.read_members(members, is_established=True)] == ["a"]
    assert f"ignoring '0-old' at the Lighthouse: it speaks protocol {PROTOCOL + 1}" in caplog.text
