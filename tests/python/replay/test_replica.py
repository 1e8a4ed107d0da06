"""Replicas equal their trainers bit for bit, and lost or damaged messages heal by a full state."""

import copy
import random
import threading
import warnings

import numpy as np
import pytest
import torch

from evermoe import optim
from evermoe._native import digest
from evermoe.copies.replay.replica import Replica
from evermoe.copies.replay.sender import GradientSender, Row
from evermoe.errors import ReplicaBehind
from evermoe.ops.cache import has_cuda_kernels
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import TensorSpec, Unit

STEPS = 1000
EXPERTS, WIDTH = 4, 1032


@pytest.fixture(autouse=True)
def _one_thread():
    """The arrays are small, and the replica's thread works concurrently."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Trainer:
    """Two dense parameters and a stack of experts; some are idle, some have no gradient, some steps are skipped."""

    def __init__(self, make, seed=0, device="cpu"):
        self.random = torch.Generator().manual_seed(seed)
        shapes = ((37, 5), (2,), (EXPERTS, WIDTH))
        self.parameters = [torch.nn.Parameter(torch.randn(shape, generator=self.random).to(device)) for shape in shapes]
        self.weight, self.bias, self.stack = self.parameters
        self.optimizer = make(self.parameters)
        experts = {f"experts.{index}": {"weights": Row(self.stack, index)} for index in range(EXPERTS)}
        self.sender = GradientSender(self.optimizer, {"dense": {"weight": self.weight, "bias": self.bias}} | experts)
        self.step_number = -1

    def gradients(self, step):
        drawn = [torch.randn(p.shape, generator=self.random) for p in self.parameters]
        if step % 5 < 2:  # as reduced in bfloat16
            drawn = [gradient.bfloat16().float() for gradient in drawn]
        drawn[2][step % EXPERTS] = 0.0 if step % 4 else -0.0
        drawn[2][(step // 7) % EXPERTS] = 0.0
        self.weight.grad, self.bias.grad, self.stack.grad = (each.to(self.weight.device) for each in drawn)
        if step % 6 == 1:
            self.bias.grad = None
        if 100 < step < 140:
            self.weight.grad = None
        if step % 3 == 0:
            torch.nn.utils.clip_grad_norm_([p for p in self.parameters if p.grad is not None], 1.0)

    def step(self):
        """Takes a step; its messages."""
        self.step_number += 1
        step = self.step_number
        for group in self.optimizer.param_groups:
            group["lr"] = 1e-2 / (1 + step / 100)
        self.gradients(step)
        if step % 50 != 49:  # a scaler skips the others
            self.optimizer.step()
        return self.sender.messages(step)

    def state(self, unit):
        """The unit's bytes, from the optimizer itself."""
        found = []
        for source, row in self.sources(unit):
            kept = self.optimizer.state.get(source, {})
            for value in [source.detach(), *(kept[key] for key in sorted(kept) if kept[key] is not None)]:
                own = value[row] if row is not None and value.dim() else value
                found.append(own.contiguous().view(-1).view(torch.uint8))
        return torch.cat([each.cpu() for each in found])

    def sources(self, unit):
        if unit == "dense":
            return [(self.weight, None), (self.bias, None)]
        return [(self.stack, int(unit.split(".")[1]))]

    @property
    def units(self):
        return ["dense", *(f"experts.{index}" for index in range(EXPERTS))]


def check(replica, trainer):
    for unit in trainer.units:
        caught, state = replica.catch_up(unit), trainer.state(unit)
        assert caught.step == trainer.step_number
        assert torch.equal(caught.state, state), unit
        assert caught.digest == digest(state.numpy())


def adamw(parameters):
    return optim.AdamW(parameters, lr=1e-2)


OPTIMIZERS = {
    "adamw": adamw,
    "adamw, other end": lambda p: optim.AdamW(p, betas=(0.3, 0.5), weight_decay=0.1, maximize=True),
    "torch adamw": lambda p: torch.optim.AdamW(p, fused=True),
    "sgd": lambda p: optim.SGD(p, momentum=0.9, nesterov=True, weight_decay=0.01),
    "torch sgd": lambda p: torch.optim.SGD(p, momentum=0.9, dampening=0.1, fused=True),
    "plain sgd": optim.SGD,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.few(3)
@pytest.mark.full
def test_replica_equals_trainer_after_many_steps(name):
    trainer = Trainer(OPTIMIZERS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        codes = set()
        with Replica(trainer.sender.layouts(), log_bytes=200_000) as replica:
            for step in range(STEPS):
                sizes = []
                for message in trainer.step():
                    received = replica.receive(message)
                    codes.add(received.code)
                    sizes.append(len(message))
                if step and name != "plain sgd":
                    assert max(sizes) <= 96 + 4 * WIDTH + 8, "gradients, not states"
                if step in (0, 49, 137, 500):
                    check(replica, trainer)
            assert codes == {"ok"}
            assert replica.log_nbytes <= 200_000
            check(replica, trainer)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_steps_that_the_optimizer_skips_itself(make):
    """As `torch.amp.GradScaler` does with fused optimizers: it hands over scale and verdict."""
    p = torch.nn.Parameter(torch.randn(77))
    optimizer = make([p], lr=0.1, fused=True)
    sender = GradientSender(optimizer, {"a": {"p": p}})
    with Replica(sender.layouts()) as replica:
        for step in range(20):
            p.grad = torch.randn(77) * 64
            optimizer.grad_scale = torch.tensor(64.0)
            optimizer.found_inf = torch.tensor(float(step in (3, 4, 11)))
            optimizer.step()
            [message] = sender.messages(step)
            kind = message[5]
            assert kind == (3 if step == 0 else 2 if step in (3, 4, 11) else 0)
            assert not replica.receive(message).needs_full_state
        state = replica.catch_up("a").state
        assert torch.equal(state[: 4 * 77].view(torch.float32), p.detach())


FAULTS = {
    "dropped": lambda m: [],
    "doubled": lambda m: [m, m],
    "cut": lambda m: [m[:-1]],
    "flipped": lambda m: [np.concatenate([m[:50], m[50:51] ^ 1, m[51:]])],
    "flipped in the name": lambda m: [np.concatenate([m[:9], m[9:10] ^ 1, m[10:]])],
    "flipped in the gradient": lambda m: [np.concatenate([m[:-1], m[-1:] ^ 64])],
    "replaced": lambda m: [np.frombuffer(b"no record", np.uint8)],
}


def deliver(replica, trainer, messages):
    """As a transport does: full states are asked for where they are needed."""
    for message in messages:
        received = replica.receive(message)
        if received.needs_full_state:
            trainer.sender.request_full_state(received.unit)


@pytest.mark.parametrize("name", FAULTS)
def test_faults_heal_by_a_full_state(name):
    trainer = Trainer(adamw)
    choose = random.Random(0)
    with Replica(trainer.sender.layouts()) as replica:
        deliver(replica, trainer, trainer.step())
        for _ in range(10):
            messages = [message.copy() for message in trainer.step()]
            victim = choose.randrange(len(messages))
            broken = FAULTS[name](messages[victim])
            deliver(replica, trainer, messages[:victim] + broken + messages[victim + 1 :])
            if name == "doubled":
                assert not replica.needs_full_state()
            else:
                behind = [unit for unit in trainer.units if replica.version(unit) != trainer.step_number]
                assert len(behind) == 1, "the damaged one alone"
            deliver(replica, trainer, trainer.step())
            deliver(replica, trainer, trainer.step())
            check(replica, trainer)


def test_swapped_messages_heal():
    trainer = Trainer(adamw)
    with Replica(trainer.sender.layouts()) as replica:
        deliver(replica, trainer, trainer.step())
        first = [message.copy() for message in trainer.step()]
        deliver(replica, trainer, [message.copy() for message in trainer.step()])
        assert set(replica.needs_full_state()) == set(trainer.units)
        deliver(replica, trainer, first)
        deliver(replica, trainer, trainer.step())
        check(replica, trainer)


def test_log_is_bounded_when_the_thread_is_slow():
    trainer = Trainer(adamw)
    replica = Replica(trainer.sender.layouts(), log_bytes=30_000, kept_steps=0)
    deliver(replica, trainer, trainer.step())
    stuck = replica._parts[1].lock  # the smallest: the thread waits for it, and nobody else has to
    held = threading.Event()
    release = threading.Event()

    def hold():
        with stuck:
            held.set()
            release.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(60)
    try:
        most = 0
        for _ in range(20):
            deliver(replica, trainer, trainer.step())
            most = max(most, replica.log_nbytes)
        assert 20_000 < most <= 30_000
    finally:
        release.set()
        holder.join()
    check(replica, trainer)
    replica.close()


def test_step_before_the_newest_can_be_reached():
    trainer = Trainer(adamw)
    states = {}
    with Replica(trainer.sender.layouts()) as replica:
        for _ in range(40):
            deliver(replica, trainer, trainer.step())
            states[trainer.step_number] = {unit: trainer.state(unit) for unit in trainer.units}
        for unit in trainer.units:
            assert torch.equal(replica.catch_up(unit, 38).state, states[38][unit])
            assert replica.version(unit) == 39
            assert torch.equal(replica.catch_up(unit).state, states[39][unit])
            with pytest.raises(ReplicaBehind, match="cannot be brought to step 38; applied steps cannot be undone"):
                replica.catch_up(unit, 38)
            with pytest.raises(ReplicaBehind, match="step 40 has not arrived, the newest is 39"):
                replica.catch_up(unit, 40)


def test_no_state_no_step():
    trainer = Trainer(adamw)
    trainer.step()
    with Replica(trainer.sender.layouts()) as replica:
        assert replica.version("dense") is None
        with pytest.raises(ReplicaBehind, match="no full state has arrived"):
            replica.catch_up("dense")
        for message in trainer.step():
            assert replica.receive(message).code == "no_state"
        with pytest.raises(KeyError):
            replica.version("nothing")


def test_closed_replica_still_catches_up():
    trainer = Trainer(adamw)
    replica = Replica(trainer.sender.layouts())
    for _ in range(5):
        deliver(replica, trainer, trainer.step())
    replica.close()
    replica.close()
    check(replica, trainer)
    with pytest.raises(ValueError, match="closed"):
        replica.receive(b"")


def test_state_that_is_changed_otherwise_is_sent_again():
    trainer = Trainer(adamw)
    with Replica(trainer.sender.layouts()) as replica:
        for step in range(9):
            if step == 3:
                with torch.no_grad():
                    trainer.weight.mul_(2)
            if step == 5:
                trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
            messages = trainer.step()
            full = [message[5] == 3 for message in messages]
            assert full == ([True] * 6 if step in (0, 5) else [step == 3] + [False] * 5)
            deliver(replica, trainer, messages)
            check(replica, trainer)


@pytest.mark.parametrize("kind", ["register_step_pre_hook", "register_step_post_hook"])
def test_hooks_later_than_the_senders_are_followed(kind):
    trainer = Trainer(adamw)
    of = {"register_step_pre_hook": lambda: trainer.stack.grad, "register_step_post_hook": lambda: trainer.weight}
    getattr(trainer.optimizer, kind)(lambda *_: (of[kind]().detach().mul_(0.5), None)[1])
    with Replica(trainer.sender.layouts()) as replica:
        for _ in range(4):
            deliver(replica, trainer, trainer.step())
            check(replica, trainer)


def test_jump_of_the_steps_sends_full_states():
    trainer = Trainer(adamw)
    with Replica(trainer.sender.layouts()) as replica:
        for _ in range(3):
            deliver(replica, trainer, trainer.step())
        trainer.step_number = 10
        deliver(replica, trainer, trainer.step())
        check(replica, trainer)


@pytest.mark.filterwarnings("ignore:replicas get the full state")
def test_other_optimizers_send_full_states_and_say_so_once():
    with pytest.warns(UserWarning, match="replicas get the full state after each step, not gradients: NAdam") as caught:
        trainer = Trainer(torch.optim.NAdam)
    assert len([each for each in caught if "replicas get" in str(each.message)]) == 1
    first = trainer.step()
    with Replica(trainer.sender.layouts()) as replica:
        deliver(replica, trainer, first)
        for _ in range(60):
            messages = trainer.step()
            expected = {1} if trainer.step_number % 50 == 49 else {3, 1} if trainer.bias.grad is None else {3}
            assert {int(message[5]) for message in messages} <= expected | {1, 2}
            deliver(replica, trainer, messages)
            check(replica, trainer)


def test_rows_that_torch_steps_otherwise_are_sent_in_full():
    stack = torch.nn.Parameter(torch.randn(3, 9))
    optimizer = torch.optim.AdamW([stack], fused=True)
    with pytest.warns(UserWarning, match="a row has 9 elements"):
        sender = GradientSender(optimizer, {"e": {"weights": Row(stack, 1)}})
    stack.grad = torch.randn(3, 9)
    for step in range(3):
        optimizer.step()
        assert sender.messages(step)[0][5] == 3


def test_frozen_parameter_is_sent_once():
    frozen, p = torch.nn.Parameter(torch.randn(5), requires_grad=False), torch.nn.Parameter(torch.randn(5))
    optimizer = optim.AdamW([p])
    sender = GradientSender(optimizer, {"a": {"frozen": frozen, "p": p}})
    kinds = []
    with Replica(sender.layouts()) as replica:
        for step in range(4):
            p.grad = torch.ones(5)
            optimizer.step()
            if step == 2:
                frozen.data = frozen.data + 1
            messages = sender.messages(step)
            kinds.append([int(message[5]) for message in messages])
            assert not any(replica.receive(message).needs_full_state for message in messages)
        assert kinds == [[3, 3], [1, 0], [3, 0], [1, 0]]
        assert torch.equal(replica.catch_up("a").state[:20].view(torch.float32), frozen)


def test_layout_is_that_of_a_sessions_units():
    """So that the digests are the same too."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2, bias=False))
    optimizer = optim.AdamW(model.parameters())
    units = {name: dict(model[int(name)].named_parameters()) for name in "01"}
    layouts = GradientSender(optimizer, units).layouts()
    state = TrainingState(model, optimizer)
    assert layouts == [state.catalog.by_name["0"], state.catalog.by_name["1"]]


def test_state_that_does_not_match_the_steps_is_a_failure():
    """A layout without moments: nothing is applied, and the error gives the reason."""
    p = torch.nn.Parameter(torch.randn(4))
    optimizer = optim.AdamW([p])
    sender = GradientSender(optimizer, {"a": {"p": p}})
    wrong = Unit(
        "a", (TensorSpec("p", (4,), torch.float32), *(TensorSpec(f"p/{x}", (4,), torch.float32) for x in "xy"))
    )
    padded = Unit("a", (*wrong.specs, TensorSpec("p/step", (), torch.float32)))
    with Replica([padded]) as replica:
        for step in range(2):
            p.grad = torch.ones(4)
            optimizer.step()
            assert replica.receive(sender.messages(step)[0]).code == "ok"
        with pytest.raises(ReplicaBehind, match="a step of AdamW was received, but the state has no 'exp_avg'"):
            replica.catch_up("a")
        optimizer.step()
        assert replica.receive(sender.messages(2)[0]).code == "failed"


def test_arguments_are_checked():
    p = torch.nn.Parameter(torch.randn(4, 2))
    optimizer = optim.AdamW([p])
    with pytest.raises(ValueError, match=r"a/p is row 4 of a tensor of shape \(4, 2\)"):
        GradientSender(optimizer, {"a": {"p": Row(p, 4)}})
    with pytest.raises(ValueError, match="same unit and name"):
        GradientSender(optimizer, {"a/b": {"p": p}, "a": {"b/p": p}})
    sender = GradientSender(optimizer, {"a": {"p": p}})
    with pytest.raises(ValueError, match="step: expected 0 or more, got -1"):
        sender.messages(-1)
    with pytest.raises(ValueError, match="log_bytes: expected"):
        Replica(sender.layouts(), log_bytes=10)
    with pytest.raises(ValueError, match="'a' is used twice"):
        Replica(sender.layouts() * 2)


def test_hooks_are_taken_off():
    trainer = Trainer(adamw)
    trainer.step()
    trainer.sender.close()
    trainer.sender.close()
    trainer.step()
    assert not trainer.optimizer._optimizer_step_pre_hooks
    assert not trainer.optimizer._optimizer_step_post_hooks


@pytest.mark.gpu
def test_replica_on_a_gpu_equals_trainer_on_the_cpu():
    if not torch.cuda.is_available() or not has_cuda_kernels():
        pytest.skip("no CUDA device, or no kernels in this build")
    trainer = Trainer(adamw)
    with Replica(trainer.sender.layouts(), device="cuda") as replica:
        for _ in range(100):
            deliver(replica, trainer, trainer.step())
        check(replica, trainer)


@pytest.mark.parametrize("make", [optim.AdamW, optim.SGD])
def test_a_replica_follows_a_trainer_on_its_device(device, make):
    trainer = Trainer(lambda parameters: make(parameters, lr=0.1), device=device)
    with Replica(trainer.sender.layouts(), device=device) as replica:
        for _ in range(20):
            deliver(replica, trainer, trainer.step())
        check(replica, trainer)


@pytest.mark.parametrize("name", ["adamw", "torch adamw", "sgd", "plain sgd"])
def test_a_replica_begins_with_bytes_that_are_here(name):
    """Also with a unit of several parameters, not all of which begin at a multiple of eight bytes."""
    trainer = Trainer(OPTIMIZERS[name])
    for _ in range(3):
        trainer.step()
    with Replica(trainer.sender.layouts()) as replica:
        for unit in trainer.units:
            trainer.sender.follow_unit(unit)
            replica.begin_with(unit, trainer.step_number, trainer.state(unit))
        check(replica, trainer)
        for _ in range(5):
            for message in trainer.step():
                assert replica.receive(message).code == "ok"
        check(replica, trainer)


def test_a_state_stays_in_the_memory_of_its_message_if_that_may_be_kept():
    trainer = Trainer(adamw)
    messages = trainer.step()
    with Replica(trainer.sender.layouts()) as replica, warnings.catch_warnings():
        warnings.simplefilter("error")
        for message in messages:
            with pytest.raises(ValueError, match="keep=True needs writable memory"):
                replica.receive(bytes(message), keep=True)
            assert replica.receive(bytes(message)).code == "ok", "its memory is not the replica's"
        check(replica, trainer)
    with Replica(trainer.sender.layouts()) as replica:
        kept = [message.copy() for message in messages]
        for message in kept:
            assert replica.receive(message, keep=True).code == "ok"
        check(replica, trainer)
        for message in trainer.step():
            replica.receive(message)
        check(replica, trainer)


def test_digests_from_the_background_count_until_the_unit_is_written():
    trainer = Trainer(adamw)

    def step_and_expected():
        for message in trainer.step():
            replica.receive(message)
        return {(unit, trainer.step_number, digest(trainer.state(unit).numpy())) for unit in trainer.units}

    with Replica(trainer.sender.layouts()) as replica:
        for _ in range(3):
            expected = step_and_expected()
            assert set(replica.survey()) == expected
            for _ in replica.catch_up_all():
                pass
            assert set(replica.survey()) == expected
        unit = "experts.1"
        lent, other = (replica.read(unit, trainer.step_number, lends=True) for _ in range(2))
        assert torch.equal(lent, trainer.state(unit))
        assert lent.data_ptr() == other.data_ptr(), "it is where the replica has it"
        assert torch.equal(replica.read("dense", trainer.step_number, lends=True), trainer.state("dense"))
        lent[8] ^= 1
        assert set(replica.survey()) == expected, "nothing is read again"
        with pytest.raises(ReplicaBehind, match="a bit has flipped"):
            replica.read(unit, trainer.step_number, lends=True)
        assert {each for each in step_and_expected() if each[0] != unit} == set(replica.survey())
