"""Scripts that would train wrongly without an error: refused, with what to do instead."""

import gc
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import evermoe
from evermoe.errors import UnsupportedState


def make(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), evermoe.MoE(8, 16, 4, top_k=1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, **options)


def session_of(model, optimizer, tmp_path, **options):
    return evermoe.Session(
        model,
        optimizer,
        evermoe.ElasticSampler(64, 8),
        membership=evermoe.Membership(memory_dir=str(tmp_path)),
        **options,
    )


TORCHRUN = """
import torch, evermoe
layer = evermoe.MoE(8, 16, 4)
session = evermoe.Session(layer, torch.optim.SGD(layer.parameters(), lr=0.1), evermoe.ElasticSampler(64, 8))
print("trains alone")
"""


@pytest.mark.long
def test_torchrun_without_a_lighthouse_would_train_one_job_in_each_process(tmp_path):
    (tmp_path / "train.py").write_text(TORCHRUN)
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0", "train.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EVERMOE_")}
    done = subprocess.run(run, check=False, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "trains alone" not in done.stdout
    assert "WORLD_SIZE is 2, as torchrun sets it, but no Lighthouse is named" in done.stderr


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({0: None}, "expected model to be a torch.nn.modules.module.Module, got None"),
        ({1: nn.Linear(1, 1)}, "expected optimizer to be a torch.optim.optimizer.Optimizer, got Linear"),
        ({2: range(5)}, r"expected sampler to be a evermoe.data.sampler.Sampler, got range\(0, 5\)"),
        (
            {2: torch.utils.data.DataLoader(range(8))},
            r"got <.*DataLoader object.*: wrap it, evermoe.ElasticLoader\(loader\)",
        ),
        ({1: torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)}, "that is not the model's"),
    ],
)
def test_what_is_no_model_optimizer_or_sampler_is_named(change, words):
    given = {**dict(enumerate((*make(), evermoe.ElasticSampler(64, 8)))), **change}
    with pytest.raises(ValueError, match=words):
        evermoe.Session(*given.values())


def test_one_model_has_one_session_at_a_time(tmp_path):
    model, optimizer = make()
    first = session_of(model, optimizer, tmp_path)
    with pytest.raises(ValueError, match="another session trains this model, or a part of it"):
        session_of(model[1], torch.optim.SGD(model[1].parameters(), lr=0.1), tmp_path)
    first.close()
    second = session_of(model, optimizer, tmp_path)
    second.close()
    third = session_of(model, optimizer, tmp_path)
    third._membership.close()
    del third
    gc.collect()
    session_of(model, optimizer, tmp_path).close()


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (None, "got NoneType"),
        (0.5, "got float"),
        (torch.zeros(2, requires_grad=True), r"got a tensor of shape \[2\]"),
        (torch.zeros(()), r"got a tensor of shape \[\] without a gradient"),
    ],
)
def test_what_is_no_loss_is_named(tmp_path, loss, found):
    with pytest.raises(ValueError, match=found):
        for step in session_of(*make(), tmp_path).steps(1):
            with step:
                step.backward(loss)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(tmp_path, kind):
    model = nn.Sequential(kind(8, 8, sparse=True), evermoe.MoE(8, 16, 4, top_k=1))
    with pytest.raises(UnsupportedState, match=rf"^{kind.__name__}, at 0 of the model, has sparse gradients"):
        session_of(model, torch.optim.SGD(model.parameters(), lr=0.1), tmp_path)


@pytest.mark.parametrize("divisor", [1, 4])
def test_loss_of_a_gradient_scaler_is_refused(tmp_path, divisor):
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(UnsupportedState, match=r"scaled by a torch.amp.GradScaler"):
        for step in session_of(model, optimizer, tmp_path).steps(1):
            with step:
                step.backward(scaler.scale(model(torch.randn(8, 8)).square().mean()) / divisor)


def test_loss_with_a_factor_of_its_own_is_fine(tmp_path):
    model, optimizer = make()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    session = session_of(model, optimizer, tmp_path)
    for step in session.steps(2):
        with step:
            step.backward(model(torch.randn(8, 8)).square().mean() * torch.tensor(0.5))
    assert session.step == 2


def test_optimizer_that_the_script_steps_is_refused_and_is_its_own_again_afterwards(tmp_path):
    model, optimizer = make(momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    with pytest.raises(UnsupportedState, match=r"optimizer.step\(\) was called inside `with step:`"):
        for step in session_of(model, optimizer, tmp_path).steps(1):
            with step:
                loss = model(torch.randn(8, 8)).square().mean()
                step.backward(loss)
                scaler.scale(loss.detach())
                scaler.step(optimizer)
    optimizer.step()


def forward(model, x, **options):
    return model[1](model[0](x)) if not options else checkpoint(lambda y: model[1](model[0](y)), x, **options)


def test_a_balance_loss_apart_from_the_reentrantly_checkpointed_output_is_refused(tmp_path):
    model, optimizer = make()
    with pytest.raises(UnsupportedState, match="load_balancing_loss, to the loss and call backward once"):
        for step in session_of(model, optimizer, tmp_path).steps(1):
            with step:
                x = torch.randn(8, 8, requires_grad=True)
                out, balance_loss = forward(model, x, use_reentrant=True), model[1].balance_loss
                step.backward(out.square().mean())
                step.backward(balance_loss)


def test_checkpointing_of_either_kind_counts_the_load_once(tmp_path):
    loads = []
    for options in ({}, {"use_reentrant": False}, {"use_reentrant": True}):
        model, optimizer = make()
        for step in session_of(model, optimizer, tmp_path).steps(1):
            with step:
                torch.manual_seed(1)
                loss = forward(model, torch.randn(8, 8, requires_grad=True), **options).square().mean()
                step.backward(loss + model[1].balance_loss)
                loads.append((model[1].load_E.tolist(), model[1].router.weight.grad.clone()))
    for load, gradient in loads[1:]:
        assert load == loads[0][0]
        assert torch.equal(gradient, loads[0][1])


@pytest.mark.parametrize("job", ["", ".", "..", "../x", "a/b", "a\nb", "x/../../../dir", ".hidden", "a" * 101, "ü"])
def test_names_that_would_be_other_paths_are_refused(tmp_path, job, monkeypatch):
    for name in ("job", "node"):
        with pytest.raises(ValueError, match=f"expected {name} to be a name of 1 to 100 letters"):
            evermoe.Membership(**{name: job})
    monkeypatch.setenv("EVERMOE_NODE", job)
    if job:  # an empty variable is one that is not set
        with pytest.raises(ValueError, match="expected node to be a name"):
            session_of(*make(), tmp_path)
    assert list(tmp_path.iterdir()) == []
