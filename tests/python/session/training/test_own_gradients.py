"""Gradients that a script changes: the same in a job that loses a node as in one process, or refused by name."""

import functools
import types

import numpy as np
import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import evermoe
from evermoe.copies.replay.calibrate import calibrate
from evermoe.copies.replay.replayable import find_arithmetics
from evermoe.errors import UnsupportedState
from evermoe.profile import Profiler
from support.flat_options import grouped
from support.habits import DATA, DIES_IN, SAMPLES, STEPS, Model, adamw, cross_entropy
from support.own_steps import changed_gradients, plain_changed_gradients


@pytest.mark.parametrize(("kind", "dense"), [("clamp", "replicated"), ("groups", "replicated"), ("groups", "sharded")])
@pytest.mark.few(2)
def test_changed_gradients_equal_plain_training_through_the_loss_of_a_node(start, kind, dense):
    """Replicas repeat the steps of the lost experts from the gradients as the script has changed them."""
    steps, weights = plain_changed_gradients(kind)
    found, logs = start(changed_gradients, "abc", kind, shard_optimizer=dense == "sharded")
    for name in "ab":
        commits = [event for event in found[name] if event["event"] == "commit"]
        assert [event["step"] for event in commits] == list(range(STEPS)), logs[name][-3000:]
        for event, expected in zip(commits, steps, strict=True):
            assert event["loss"] == pytest.approx(expected["loss"], abs=1e-6)
            assert event["norm"] == pytest.approx(expected["norm"], rel=1e-5)
            assert event["seen"] == ([pytest.approx(expected["seen"], rel=1e-5)] if expected["seen"] else [])
        (recovered,) = [event for event in found[name] if event["event"] == "recovered" and event["step"]]
        assert (recovered["step"], recovered["steps_lost"], recovered["digests_mismatched"]) == (DIES_IN, 0, 0)
        assert [event["digests_mismatched"] for event in found[name] if event["event"] == "verified"] == [0]
    (state,) = [event["weights"] for name in "ab" for event in found[name] if event.get("weights")]
    assert state.keys() == weights.keys()
    for name, values in state.items():
        assert np.abs(np.array(values) - np.array(weights[name])).max() < 1e-6, name


def session_of(model, optimizer, folder, **options):
    sampler = evermoe.ElasticSampler(SAMPLES, 12)
    membership = options.pop("membership", None) or evermoe.Membership(memory_dir=str(folder))
    return evermoe.Session(model, optimizer, sampler, membership=membership, **options)


def run(session, model, steps=2, before_step=lambda number: None, **backward):
    for step in session.steps(steps):
        before_step(step.number)
        with step:
            loss = cross_entropy(model, DATA[step.indices], reduction="sum" if backward else "mean")
            step.backward(loss, **backward)


# ---- one process


@pytest.mark.parametrize("counts", [False, True])
def test_the_norm_is_that_of_the_mean_loss_before_it_is_clipped(tmp_path, counts):
    """Whatever a scaler or a count multiplies gradients by; NaN before the first step."""
    model = Model()
    cross_entropy(model, DATA[evermoe.ElasticSampler(SAMPLES, 12).share(0, 1).indices]).backward()
    expected = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    events = []
    scaler, listener = torch.amp.GradScaler("cpu", 2.0**10), events.append
    session = session_of(model, adamw(model), tmp_path, scaler=scaler, max_grad_norm=0.01, on_event=listener)
    assert np.isnan(session.grad_norm)
    run(session, model, 1, **({"count": 12 * (DATA.shape[1] - 1)} if counts else {}))
    assert session.grad_norm == pytest.approx(expected, rel=1e-5)
    assert [event.grad_norm for event in events if event.name == "commit"] == [session.grad_norm]


def test_the_norm_of_the_latest_step_is_known_after_a_resume(tmp_path):
    norms = []
    for steps in (2, 2):
        model = Model()
        session = session_of(model, adamw(model), tmp_path, checkpoints=str(tmp_path / "checkpoints"))
        run(session, model, steps)
        norms.append(session.grad_norm)
    assert norms[0] == norms[1] > 0


def test_the_norm_is_clipped_after_the_script_has_changed_gradients(tmp_path):
    """The script gets gradients divided by the loss scale; the reported norm is that of the gradients it got."""
    norms = []

    def doubled(gradients):
        norms.append(gradients.norm())
        for _, gradient in gradients:
            gradient.mul_(2)
        norms.append(gradients.norm())

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    scaler = torch.amp.GradScaler("cpu", 2.0**10)
    session = session_of(model, optimizer, tmp_path, on_gradients=doubled, max_grad_norm=1e-3, scaler=scaler)
    run(session, model, 1)
    assert norms[1] == pytest.approx(2 * norms[0])
    assert session.grad_norm == pytest.approx(norms[0])
    moved = torch.nn.utils.get_total_norm([p - q for p, q in zip(model.parameters(), before, strict=True)])
    assert moved.item() == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize("has_hook", [False, True])
def test_evermoe_clips_in_its_step_unless_own_code_runs_in_it(tmp_path, has_hook):
    """The code sees clipped gradients. Without it they keep their values; the weights have the same bits."""

    def norm():
        return torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()

    seen, weights = [], {}
    for is_last in (False, True):
        model = Model()
        optimizer = evermoe.optim.SGD(model.parameters(), lr=1.0)
        if has_hook or not is_last:
            optimizer.register_step_pre_hook(lambda *_: seen.append(norm()))
        session = session_of(model, optimizer, tmp_path / str(is_last), max_grad_norm=1e-3)
        run(session, model, 1)
        weights[is_last] = [p.detach().clone() for p in model.parameters()]
    assert seen[-1] == pytest.approx(1e-3, rel=1e-3)
    assert norm() == pytest.approx(1e-3 if has_hook else session.grad_norm, rel=1e-3)
    assert all(torch.equal(*pair) for pair in zip(*weights.values(), strict=True))


def test_gradients_that_are_not_finite_are_not_given_to_the_script(tmp_path):
    calls = []
    model = Model()
    session = session_of(model, adamw(model), tmp_path, on_gradients=calls.append, on_nonfinite="skip")
    for step in session.steps(3):
        with step:
            step.backward(cross_entropy(model, DATA[step.indices]) * (float("inf") if step.number == 1 else 1))
    assert [each.step for each in calls] == [0, 2]
    assert session.skipped == 1


def test_gradients_that_the_script_makes_infinite_leave_the_step_out(tmp_path):
    def spoil(gradients):
        for _, gradient in gradients:
            gradient.div_(0)

    model = Model()
    with pytest.raises(evermoe.errors.NonFiniteLoss, match="step 0"):
        run(session_of(model, adamw(model), tmp_path, on_gradients=spoil), model)


def test_an_error_of_the_script_ends_its_step(tmp_path):
    model = Model()
    session = session_of(model, adamw(model), tmp_path, on_gradients=lambda gradients: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(session, model)
    assert session.has_left and session.step == 0


def test_noise_is_that_of_the_seed_the_step_and_the_name(tmp_path):
    def draws(seed):
        found = {}

        def draw(gradients):
            for name, gradient in gradients:
                found[gradients.step, name] = torch.rand(2, generator=gradients.generator(name)).tolist()
                assert gradient.shape

        model = Model()
        run(session_of(model, adamw(model), tmp_path, on_gradients=draw, seed=seed), model)
        return found

    one, two, other = draws(0), draws(0), draws(1)
    assert one == two
    names = {name for _, name in one}
    assert {"embedding.weight", "head.bias", "first.router.weight", "first.experts.0", "second.experts.3"} <= names
    values = [tuple(value) for each in (one, other) for value in each.values()]
    assert len(set(values)) == len(values) == 2 * 2 * len(names)


# ---- refused: a step that replicas repeat has code of the script's


def clip(optimizer, *_):
    """A hook."""


class Clipping(torch.optim.AdamW):
    """Clips in its own step, if it is asked to: no trial shows that."""

    limit = None

    def step(self, closure=None):
        for group in self.param_groups if self.limit else ():
            torch.nn.utils.clip_grad_value_(group["params"], self.limit)
        return super().step(closure)


CODE = {
    "pre": (lambda optimizer: optimizer.register_step_pre_hook(clip), r"register_step_pre_hook\(clip of .*gradients\)"),
    "post": (lambda optimizer: optimizer.register_step_post_hook(lambda *_: None), r"_post_hook\(.*<lambda> of"),
    "partial": (
        lambda optimizer: optimizer.register_step_pre_hook(functools.partial(clip)),
        r"the hook optimizer.register_step_pre_hook\(clip of",
    ),
    "all before": (lambda _: register_optimizer_step_pre_hook(clip), r"hook register_optimizer_step_pre_hook\(clip"),
    "all after": (lambda _: register_optimizer_step_post_hook(clip), r"hook register_optimizer_step_post_hook\(clip"),
    "instance": (
        lambda optimizer: setattr(optimizer, "step", types.MethodType(lambda self: None, optimizer)),
        r"optimizer.step = .*<lambda> of",
    ),
    "below a scheduler": (
        lambda optimizer: (
            setattr(optimizer, "step", types.MethodType(clip, optimizer)),
            torch.optim.lr_scheduler.StepLR(optimizer, 9),
        ),
        r"optimizer.step = clip of",
    ),
    "average": (evermoe.optim.EMA, r"post_hook\(EMA._after_step of evermoe.optim.ema\)"),
}
LATE = ["pre", "all after", "instance", "average"]


@pytest.fixture
def add():
    """`add(kind, optimizer)` adds code, which is gone after the test."""
    handles = []

    def begin(kind, optimizer):
        handles.append(CODE[kind][0](optimizer))

    yield begin
    for each in handles:
        if hasattr(each, "remove"):
            each.remove()


@pytest.mark.parametrize("kind", [kind for kind in CODE if kind != "average"])
def test_code_in_a_step_that_replicas_repeat_is_refused_by_name(add, tmp_path, kind):
    """Before the session asks anyone; a job of one process and a preset that sends the state take it."""
    model = Model()
    optimizer = adamw(model)
    add(kind, optimizer)
    membership = evermoe.Membership(lighthouse="http://127.0.0.1:9", job="refused")
    with pytest.raises(UnsupportedState, match=CODE[kind][1]) as refused:
        session_of(model, optimizer, tmp_path, membership=membership)
    assert "Session(on_gradients=...)" in str(refused.value)
    assert "one of gemini, pec, baft, lazarus" in str(refused.value)
    session_of(model, optimizer, tmp_path).close()


@pytest.mark.parametrize("kind", LATE)
@pytest.mark.few(4)
def test_code_that_comes_later_is_refused_in_the_next_step(start_job, add, kind):
    job, model = start_job(1), Model()
    optimizer = adamw(model)
    session = session_of(model, optimizer, None, **grouped(job.session, lighthouse=job.address))
    with pytest.raises(UnsupportedState, match=CODE[kind][1]):
        run(session, model, 4, lambda number: add(kind, optimizer) if number == 2 else None)
    assert session.step == 2


def test_code_of_torch_and_of_evermoe_is_no_matter(start_job):
    job, model = start_job(1), Model()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 9)
    profiler = Profiler(model, keep=2)
    profiler.attach()
    session = session_of(model, optimizer, None, scheduler=scheduler, **grouped(job.session, lighthouse=job.address))
    try:
        run(session, model)
    finally:
        profiler.detach()
    assert session.step == 2


def test_a_step_of_a_class_of_ones_own_is_not_repeated(caplog):
    """Although it has the bits of torch's in all trials: copies get the state after it."""
    optimizer = Clipping([torch.nn.Parameter(torch.randn(16, 16))], fused=True)
    assert calibrate(optimizer).variant == "torch_cpu_fused"
    assert not find_arithmetics(optimizer)
    assert "Clipping.step of" in caplog.text
