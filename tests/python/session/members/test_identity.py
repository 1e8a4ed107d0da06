"""Who belongs to a job and what its state is: strangers, leftovers, versions that only grow, settings that travel."""

from __future__ import annotations

import pytest
import torch

import evermoe
from evermoe import Checkpoints, Membership, Placement
from evermoe.checkpoint.checkpoint_folder import find, find_manifests
from evermoe.checkpoint.manifest import SAVE
from evermoe.comm.lighthouse import start_lighthouse
from evermoe.config.variables import find_membership
from evermoe.copies.snapshot.store import SnapshotStore
from evermoe.errors import PeerLost, UnsupportedState
from evermoe.launch import LocalJob
from evermoe.presets import Auto
from evermoe.session.session_config import session_config
from evermoe.state import loop_state
from evermoe.state.loop_state import LoopParts as Parts
from evermoe.state.training_state import TrainingState
from support.harness import wait_until
from support.history import check_history, check_recovered
from support.worker import Fault, wait_until_written


def make_layer(experts=4):
    torch.manual_seed(0)
    layer = evermoe.MoE(8, 16, experts, top_k=1)
    return layer, torch.optim.AdamW(layer.parameters(), fused=True)


def run_alone(layer, optimizer, until, **options):
    session = evermoe.Session(layer, optimizer, evermoe.ElasticSampler(64, 8), **options)
    for step in session.steps(until):
        with step:
            step.backward(layer(torch.randn(8, 8)).square().mean())
    return session


def test_versions_grow_when_a_new_job_resumes_from_an_old_checkpoint(tmp_path, monkeypatch):
    memory, saved = str(tmp_path), tmp_path / "saved"
    with monkeypatch.context() as patched:
        patched.setattr(SnapshotStore, "newest_generation", lambda store: 7)  # as after many changes of membership
        session = evermoe.Session(
            *make_layer(),
            evermoe.ElasticSampler(64, 8),
            membership=evermoe.Membership(job="old", memory_dir=memory),
            checkpoints=saved,
        )
    for step in session.steps(3):
        with step:
            step.backward(session.model(torch.randn(8, 8)).square().mean())
    membership = evermoe.Membership(job="new", memory_dir=memory)
    run_alone(*make_layer(), 5, membership=membership, checkpoints=saved)
    versions = {path.name: version for version, path in find(tmp_path / "saved").items()}
    assert versions["step-00000005"] > versions["step-00000003"] > 7 << 40


def is_durable(session, folder):
    found = find_manifests(folder, session._state.catalog.layout, (SAVE,))
    return any(each.version == session.version for each in found)


def test_state_with_older_experts_never_goes_by_the_version_that_it_is_not_of(tmp_path, monkeypatch):
    """Not even where a peer is lost before the members know what it costs."""
    options = {
        "preset": evermoe.presets.Pec(experts_per_save=1),
        "membership": evermoe.Membership(job="stale", memory_dir=str(tmp_path)),
        "checkpoints": str(tmp_path / "saved"),
    }
    session = evermoe.Session(*make_layer(), evermoe.ElasticSampler(64, 8), **options)
    reached = []
    for step in session.steps(100):
        wait_until_written(session)
        with step:
            step.backward(session.model(torch.randn(8, 8)).square().mean())
        reached.append(session.version)
        if session.step == 3:
            wait_until(lambda: is_durable(session, tmp_path / "saved"), "what is saved of step 3 is durable")
            break
    again = evermoe.Session(*make_layer(), evermoe.ElasticSampler(64, 8), **options)
    seen, count_losses = [], again._protection.count_losses

    def lose_a_peer(stale, *arguments):
        seen.append((again.version, dict(stale)))
        if len(seen) == 1:
            raise PeerLost("asked for")
        return count_losses(stale, *arguments)

    monkeypatch.setattr(again._protection, "count_losses", lose_a_peer)
    next(again.steps(4))
    assert (again.step, len(seen)) == (3, 2)
    assert seen[0][1], "with one expert saved at a step, most are older"
    assert seen[0][0] not in reached
    again.close()


def test_start_of_an_earlier_job_is_not_taken_for_that_of_the_next_one(tmp_path):
    """Its files are replaced, although the version is the same."""
    for seed in range(2):
        layer, optimizer = make_layer()
        torch.manual_seed(seed)
        layer.experts.reset_parameters()
        membership = evermoe.Membership(job=f"job{seed}", memory_dir=str(tmp_path))
        options = {"preset": "pec", "membership": membership, "checkpoints": str(tmp_path / "saved")}
        session = evermoe.Session(layer, optimizer, evermoe.ElasticSampler(64, 8), **options)
        next(session.steps(3))
        mine = {
            unit: torch.empty(session._state.catalog.by_name[unit].nbytes, dtype=torch.uint8)
            for unit in session._state.held()
        }
        for unit, data in mine.items():
            session._state.read(unit, data)
        (saved,) = find_manifests(tmp_path / "saved", session._state.catalog.layout, (SAVE,))
        assert saved.units.keys() == mine.keys()
        assert all(torch.equal(saved.units[unit].data, data) for unit, data in mine.items())
        session.close()


@pytest.mark.long
def test_joiner_that_loses_all_peers_does_not_start_the_job_again(start_job):
    job = start_job(2, preset="gemini", join_interval=1)
    job.open_gate(6)
    a, b = job.start_all({name: [Fault("phase fetch", nth=2)] for name in "ab"}, "ab", gated=True, steps=150)
    a.wait_for("gate", step=6)
    c = job.start("c", steps=150)
    job.take_in(c, until=150)
    assert [a.join(), b.join()] == [-9, -9]
    again = job.start("a", steps=150)
    assert [again.join(), c.join()] == [0, 0]
    check_history(job.workers)
    for each in (again, c):
        recovered = check_recovered(job.workers, each)
        assert recovered["step"] >= 6
        assert (recovered["members"], recovered["steps_lost"]) == (2, 0)


def test_joiner_left_alone_with_nothing_does_not_start_the_job_again(start_job):
    job = start_job(1, join_interval=1)
    job.open_gate(6)
    a = job.start("a", Fault("phase fetch", nth=2), gated=True, steps=500)
    a.wait_for("gate", step=6)
    c = job.start("c", steps=500)
    job.take_in(c, until=500)
    assert a.join() == -9
    job.lose_node("a")
    assert c.join(30) == 1
    assert c.events("failed")[0]["error"] == "LostExperts"
    assert c.events("commit") == []


@pytest.mark.parametrize("point", ["confirm", "commit"])
def test_death_that_only_some_have_noticed_between_steps(start_job, point):
    job = start_job(join_interval=1)
    workers = a, b, c = job.start_all({"b": [Fault(point, step=6)]}, steps=12)
    assert [each.join() for each in workers] == [0, -9, 0]
    check_history(workers)
    for survivor in (a, c):
        recovered = check_recovered(workers, survivor)
        assert recovered["members"] == 2
        assert recovered["time"] - b.events("fault")[0]["time"] < 6


def test_memory_of_another_model_is_refused(tmp_path):
    layer, optimizer = make_layer()
    session = evermoe.Session(
        layer,
        optimizer,
        evermoe.ElasticSampler(64, 8),
        membership=evermoe.Membership(job="j", memory_dir=str(tmp_path)),
    )
    with pytest.raises(KeyError):
        for step in session.steps(5):
            with step:
                step.backward(layer(torch.randn(8, 8)).square().mean())
            raise KeyError("outside the step")
    del step
    with pytest.raises(ValueError, match=r"another model or optimizer.*remove the folder"):
        evermoe.Session(
            *make_layer(5),
            evermoe.ElasticSampler(64, 8),
            membership=evermoe.Membership(job="j", memory_dir=str(tmp_path)),
        )
    assert run_alone(*make_layer(), 3, membership=evermoe.Membership(job="j", memory_dir=str(tmp_path))).step == 3
    assert list(tmp_path.iterdir()) == []


def test_one_job_runs_once_on_a_machine(tmp_path):
    with (
        LocalJob(["true"], "twice", 1, memory_dir=str(tmp_path)) as job,
        pytest.raises(ValueError, match="already running on this machine"),
        LocalJob(["true"], "twice", 1, lighthouse=job.lighthouse, memory_dir=str(tmp_path)),
    ):
        pass


def test_evaluation_ends_early_when_a_peer_is_lost_and_training_continues(tmp_path):
    layer, optimizer = make_layer()
    session = evermoe.Session(
        layer, optimizer, evermoe.ElasticSampler(64, 8), membership=evermoe.Membership(memory_dir=str(tmp_path))
    )
    seen = []
    for step in session.steps(3):
        with step:
            step.backward(layer(torch.randn(8, 8)).square().mean())
        with session.evaluation():
            seen.append((layer.training, torch.is_grad_enabled()))
            if session.step == 2:
                raise evermoe.errors.PeerLost("somebody")
        assert layer.training
    assert seen == [(False, False)] * 3
    assert session.step == 3
    assert len(session.reports) == 2


def test_lost_peer_of_another_group_in_a_step_is_recovered_from(tmp_path):
    layer, optimizer = make_layer()
    session = evermoe.Session(
        layer, optimizer, evermoe.ElasticSampler(64, 8), membership=evermoe.Membership(memory_dir=str(tmp_path))
    )
    raised = []
    for step in session.steps(3):
        with step:
            step.backward(layer(torch.randn(8, 8)).square().mean())
            if step.number == 1 and not raised:
                raised.append(step.number)
                raise PeerLost("of the script's own")
    assert (session.step, len(session.reports)) == (3, 2)


def test_step_that_is_left_out_is_an_error_unless_the_job_is_stopped(tmp_path):
    layer, optimizer = make_layer()
    session = evermoe.Session(
        layer, optimizer, evermoe.ElasticSampler(64, 8), membership=evermoe.Membership(memory_dir=str(tmp_path))
    )
    for step in session.steps(9):
        if session.step == 2:
            session.stop()
            continue
        with step:
            step.backward(layer(torch.randn(8, 8)).square().mean())
    assert session.step == 2
    again = evermoe.Session(
        layer, optimizer, evermoe.ElasticSampler(64, 8), membership=evermoe.Membership(memory_dir=str(tmp_path))
    )
    with pytest.raises(RuntimeError, match="must be used as `with step:`"):
        list(again.steps(9))


def test_worker_whose_job_is_over_ends_with_a_model_that_nobody_uses(tmp_path, monkeypatch):
    (tmp_path / "finished").touch()
    monkeypatch.setenv("EVERMOE_FINISHED", str(tmp_path / "finished"))
    server = start_lighthouse(heartbeat_timeout=1, join_timeout=5)
    try:
        membership = evermoe.Membership(lighthouse=server.address(), job="late", members=2, memory_dir=str(tmp_path))
        session = evermoe.Session(*make_layer(), evermoe.ElasticSampler(64, 8), membership=membership)
        with pytest.raises(SystemExit) as ended:
            list(session.steps(3))
    finally:
        server.shutdown()
    assert ended.value.code == 0
    assert list(tmp_path.glob("**/*.arena")) == []


def test_second_session_of_a_script_under_a_lighthouse_is_refused(tmp_path):
    server = start_lighthouse(heartbeat_timeout=1, join_timeout=5)
    try:
        membership = evermoe.Membership(lighthouse=server.address(), job="first", memory_dir=str(tmp_path))
        assert run_alone(*make_layer(), 2, membership=membership).step == 2
        with pytest.raises(RuntimeError, match="a script has one session"):
            run_alone(*make_layer(), 2, membership=membership)
    finally:
        server.shutdown()


def test_model_of_one_member_works_after_its_session(tmp_path):
    layer, optimizer = make_layer()
    run_alone(layer, optimizer, 2, membership=evermoe.Membership(memory_dir=str(tmp_path)))
    assert layer(torch.randn(5, 8)).shape == (5, 8)


def test_session_that_has_left_says_so(tmp_path):
    session = run_alone(*make_layer(), 2, membership=evermoe.Membership(memory_dir=str(tmp_path)))
    with pytest.raises(RuntimeError, match="has left its job"), session.evaluation():
        pass
    with pytest.raises(RuntimeError, match="has left its job"):
        next(session.steps(5))


def test_job_without_a_name_leaves_nothing_behind(tmp_path):
    layer, optimizer = make_layer()
    session = evermoe.Session(
        layer, optimizer, evermoe.ElasticSampler(64, 8), membership=evermoe.Membership(memory_dir=str(tmp_path))
    )
    for step in session.steps(3):
        with step:
            step.backward(layer(torch.randn(8, 8)).square().mean())
        assert list(tmp_path.glob("**/*.arena"))
        break
    assert list(tmp_path.iterdir()) == []


def test_frozen_and_unused_experts_stay_as_they_are(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.ModuleList([evermoe.MoE(8, 16, 4, top_k=1) for _ in range(3)])
    model[0].experts.weights.requires_grad_(False)
    before = [layer.experts.weights.detach().clone() for layer in model]
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.5, fused=True)
    session = evermoe.Session(
        model, optimizer, evermoe.ElasticSampler(64, 8), membership=evermoe.Membership(memory_dir=str(tmp_path))
    )
    for step in session.steps(2):
        with step:
            step.backward(model[1](model[0](torch.randn(8, 8))).square().mean())
    assert torch.equal(model[0].experts.weights, before[0])
    assert not torch.equal(model[1].experts.weights, before[1])
    assert torch.equal(model[2].experts.weights, before[2])


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.NAdam,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        torch.optim.Rprop,
    ],
)
def test_optimizers_that_do_not_start_from_zeros_are_refused(make):
    layer, _ = make_layer()
    with pytest.raises(UnsupportedState, match="starts from other state than zeros"):
        TrainingState(layer, make(layer.parameters()))


class Rebinding(torch.optim.Optimizer):
    """Momentum whose buffer is a new tensor in every step."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                old = self.state[p].get("m", torch.zeros_like(p))
                self.state[p]["m"] = 0.9 * old + (p.grad if p.grad is not None else 0)
                p.sub_(group["lr"] * self.state[p]["m"])


def test_state_that_the_optimizer_rebinds_is_copied_as_it_is_now():
    layer, _ = make_layer()
    optimizer = Rebinding(layer.parameters())
    state = TrainingState(layer, optimizer)
    layer(torch.randn(5, 8)).sum().backward()
    optimizer.step()
    unit = state.catalog.by_name["router"]
    data = torch.empty(unit.nbytes, dtype=torch.uint8)
    state.read("router", data)
    assert torch.equal(unit.tensors(data)["weight/m"], optimizer.state[layer.router.weight]["m"])
    assert optimizer.state[layer.router.weight]["m"].count_nonzero()


def test_layers_that_share_their_experts_are_refused():
    model = torch.nn.ModuleList([evermoe.MoE(8, 16, 4), evermoe.MoE(8, 16, 4)])
    model[1].experts.weights = model[0].experts.weights
    with pytest.raises(UnsupportedState, match="may not share"):
        TrainingState(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_all_settings_that_a_scheduler_changes_travel():
    sampler = evermoe.ElasticSampler(64, 8)

    def make():
        layer, _ = make_layer()
        optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
        return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)

    optimizer, scheduler = make()
    for _ in range(4):
        optimizer.step()
        scheduler.step()
    other, other_scheduler = make()
    assert other.param_groups[0]["betas"] != optimizer.param_groups[0]["betas"]
    loop_state.restore(loop_state.collect(Parts(sampler, optimizer, scheduler)), Parts(sampler, other, other_scheduler))
    for key in ("lr", "betas", "weight_decay"):
        assert other.param_groups[0][key] == optimizer.param_groups[0][key]
        assert type(other.param_groups[0][key]) is type(optimizer.param_groups[0][key])


def test_a_scheduler_that_only_one_side_has_is_no_error():
    sampler = evermoe.ElasticSampler(64, 8)
    layer, _ = make_layer()
    with_schedule = torch.optim.AdamW(layer.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(with_schedule, 0.1, total_steps=20)
    without = torch.optim.AdamW(layer.parameters(), lr=0.1)
    loop_state.restore(loop_state.collect(Parts(sampler, with_schedule, scheduler)), Parts(sampler, without, None))
    loop_state.restore(loop_state.collect(Parts(sampler, without, None)), Parts(sampler, with_schedule, scheduler))
    assert without.param_groups[0]["betas"] == with_schedule.param_groups[0]["betas"]


def test_options_that_all_members_must_share_are_marked_so():
    shared = session_config(replication=3).shared()
    assert shared["replication"] == "3"
    own = {*Membership.names()} - {"transport", "join_interval", "join_wait", "on_corruption", "on_slow"}
    own |= {"url", "store_timeout", "upload_limit", "download_limit"}
    own |= {"snapshot_memory", "replay_log_bytes", "replica_device"}
    groups = {"membership": Membership, "placement": Placement, "checkpoints": Checkpoints, "auto": Auto}
    names = {f"{group}.{name}" for group, kind in groups.items() for name in kind.names() if name not in own}
    names |= {"preset", "replication", "shard_optimizer", "max_grad_norm", "on_nonfinite", "seed", "mesh"}
    assert set(shared) == names | {"on_gradients", "stateful"}


def test_pec_needs_a_folder():
    with pytest.raises(ValueError, match="the preset pec saves to a checkpoint store: expected checkpoints to be"):
        session_config(preset="pec")


def test_lighthouse_without_a_job_name_is_refused(monkeypatch):
    for variable in ("EVERMOE_JOB", "JOB_ID", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ValueError, match="must name the job"):
        find_membership(Membership(lighthouse="http://127.0.0.1:1"))
