"""With shard_optimizer="overlap" weights arrive during the next forward: modules wait for their own, no bit differs."""

import copy
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn

from evermoe import ElasticSampler, Session
from evermoe.comm.background_collectives import BackgroundCollectives
from evermoe.comm.group import Group
from evermoe.comm.owner_collectives import send_from_owners
from evermoe.errors import PeerLost, UnsupportedState
from evermoe.session import late_weights
from evermoe.session.late_weights import LateWeights
from support.harness import PATIENCE
from support.history import check_history, check_recovered, committed_steps
from support.ranks import run_ranks
from support.worker import Fault

FAULT = 5
NBYTES = 64
"""Of a bucket: each layer has more."""
CPU = torch.device("cpu")


def background(group, folder):
    side = Group()
    store = dist.FileStore(f"{folder}/side", group.size)
    side.rebuild(store, group.rank, group.size, torch.device("cpu"), timedelta(seconds=PATIENCE / 2))
    group.all_reduce(torch.zeros(1))  # all are connected: one that drops its group at once would end others' connecting
    return BackgroundCollectives(side, group, CPU)


class Held:
    """Sends the second bucket once somebody says so."""

    def __init__(self, store):
        self.store, self.count = store, 0

    def __call__(self, tensors_R, group):
        self.count += 1
        if self.count == 2:
            self.store.wait(["first is used"])
        send_from_owners(tensors_R, group)


def used(group, folder, way):
    """Return what rank 1 reads of two layers of rank 0: the first before the second has been sent, then the second."""
    store = dist.FileStore(f"{folder}/events", group.size)
    late_weights.send_from_owners = Held(store) if group.rank == 0 else send_from_owners
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    with torch.no_grad():
        for number, layer in enumerate(model):
            layer.weight.fill_(number + 1 if group.rank == 0 else -1)
    late = LateWeights(threads := background(group, folder), model)
    late.begin([[[layer.weight], []] for layer in model])
    read = {
        "forward": lambda layer: layer(torch.ones(1, 8)).detach(),
        "state": lambda layer: layer.state_dict()["weight"].sum(1),
    }[way]
    first = read(model[0]).clone() if group.rank == 1 else None
    if group.rank == 1:
        store.set("first is used", "")
    second = read(model[1]).clone()
    late.wait()
    is_idle = not late._tasks
    late.close()
    threads.close()
    hooks = [hook for layer in model for hook in (*layer._forward_pre_hooks, *layer._state_dict_pre_hooks)]
    return [first, second, is_idle, len(hooks)]


@pytest.mark.parametrize("way", ["forward", "state"])
def test_a_module_waits_for_its_own_weights_and_no_others(tmp_path, way):
    _, (first, second, is_idle, hooks) = run_ranks(tmp_path, 2, used, str(tmp_path), way)
    assert torch.equal(first.flatten(), torch.full((8,), 8.0))
    assert torch.equal(second.flatten(), torch.full((8,), 16.0))
    assert is_idle and not hooks


def swapped(group, folder):
    """Return what another rank gets while the owner's script has put averages in the weights' place."""
    store = dist.FileStore(f"{folder}/events", group.size)
    late_weights.send_from_owners = Held(store) if group.rank == 0 else send_from_owners
    layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))
    for layer in layers:
        layer.weight.data.fill_(float(group.rank == 0))
    late = LateWeights(threads := background(group, folder), layers)
    late.begin([[[layer.weight], []] for layer in layers])
    if group.rank == 0:
        kept = [layer.weight.data for layer in layers]
        for layer in layers:
            layer.weight.data = torch.full((8, 8), 7.0)
        store.set("first is used", "")
        late.wait()
        for layer, data in zip(layers, kept, strict=True):
            layer.weight.data = data
    late.wait()
    threads.close()
    return [layer.weight.detach() for layer in layers]


def test_averages_that_are_applied_meanwhile_are_not_sent(tmp_path):
    for weights in run_ranks(tmp_path, 2, swapped, str(tmp_path)):
        assert all(torch.equal(weight, torch.ones(8, 8)) for weight in weights)


class Parts(nn.Module):
    """Reads parameters of children that it does not call."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.parts = nn.ParameterList(torch.ones(1) for _ in range(3))

    def forward(self, x):
        return self.attention(x, x, x)[0] * sum(self.parts)


def test_modules_wait_for_parameters_of_children_that_they_do_not_call():
    model = Parts()
    late, waited = LateWeights(BackgroundCollectives(Group(), Group(), CPU), model), []
    late._wait_for = lambda parameters: waited.extend(map(id, parameters))
    model(torch.ones(1, 1, 8))
    late.close()
    assert set(waited) == {id(parameter) for parameter in model.parameters()}


def test_a_model_can_be_copied_and_saved(tmp_path):
    model = nn.Linear(4, 4)
    late = LateWeights(BackgroundCollectives(Group(), Group(), CPU), model)
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(other(torch.ones(1, 4)), model(torch.ones(1, 4)))
    late.close()


def lost(group, folder):
    """Let a module wait for weights of a member that is gone."""
    model = nn.Linear(8, 8)
    late = LateWeights(threads := background(group, folder), model)
    if group.rank == 0:
        threads.group.drop("it leaves")
        return "left"
    late.begin([[list(model.parameters()), []]])
    try:
        with pytest.raises(PeerLost):
            model(torch.ones(1, 8))
        threads._trainers.finishes_steps = True
        model(torch.ones(1, 8))
        late.wait_in_step()
        with pytest.raises(PeerLost):
            model.state_dict()
    finally:
        threads.close()
    return "lost"


def test_a_module_whose_weights_do_not_come_says_that_a_member_is_lost_unless_the_step_runs_to_its_end(tmp_path):
    assert run_ranks(tmp_path, 2, lost, str(tmp_path)) == ["left", "lost"]


def trained(start_job, faults, shard_optimizer):
    job = start_job(shard_optimizer=shard_optimizer)
    workers = job.start_all(faults, bucket_bytes=NBYTES)
    assert [each.join() for each in workers] == [0, -9 if faults else 0, 0]
    check_history(workers)
    left = workers[::2] if faults else workers
    for each in left:
        [verified] = each.events("verified")
        assert verified["digests_mismatched"] == 0, verified["units"]
    return workers


@pytest.mark.long
def test_losses_and_states_are_those_of_training_that_waits(start_job):
    found = []
    for overlaps in (False, True):
        workers = trained(start_job, {}, shard_optimizer="overlap" if overlaps else True)
        done = [each.events("done")[0]["digests"] for each in workers]
        found.append(([event["loss"] for event in workers[0].events("commit")], done))
    assert found[0] == found[1]


@pytest.mark.parametrize("point", ["gather", "copy", "begin", "forward", "vote"])
def test_an_owner_is_killed_while_weights_are_on_their_way(start_job, point):
    step = FAULT + (point in ("copy", "gather"))
    a, b, c = workers = trained(start_job, {"b": [Fault(point, step)]}, shard_optimizer="overlap")
    for survivor in (a, c):
        recovered = survivor.events("recovered")[-1]
        if point != "gather":  # its replicas alone have seen what becomes of its units
            check_recovered(workers, survivor)
        assert recovered["step"] >= committed_steps([b])
        assert (recovered["members"], recovered["steps_lost"], recovered["digests_mismatched"]) == (2, 0, 0)


def make(**options):
    model = nn.Linear(4, 4)
    return Session(model, torch.optim.SGD(model.parameters(), lr=0.1), ElasticSampler(8, 4), **options)


def test_compiled_graphs_are_refused(tmp_path):
    model = nn.Linear(4, 4)
    late = LateWeights(BackgroundCollectives(Group(), Group(), CPU), model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with pytest.raises((UnsupportedState, torch._dynamo.exc.Unsupported), match="shard_optimizer='overlap'"):
        compiled(torch.ones(1, 4))
    late.close()
