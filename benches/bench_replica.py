"""Replicas: bytes of each kind of step, and time relative to a copy of the gradient and to the optimizer's step.

    python benches/bench_replica.py [--json PATH] [--elements 8388608] [--threads 1 2] [--seconds 5]

"bytes" is the size of the record of one step, per parameter. "encode" is the trainer's work on a gradient. "receive" is
the replica's work until a record is in its log. "apply" is its work to repeat 8 steps, divided by 8. "checks" is the
time to compare the state and the gradients with the digests of what was written, and to digest the new state; "apply"
includes the check of the state. Ratios are to a copy of the float32 gradient. "of_step" is all of the sender's work
(both hooks and `messages`) relative to the `step()` of evermoe's AdamW. The candidates run in turns.
"""

import numpy as np
import torch

from common import Table, medians, parse, parser, ratio, take_turns
from evermoe import optim
from evermoe._native import RECORD_HEADER_BYTES, ReplayLog, encode_gradient, seal_record, state_digest
from evermoe.copies.replay.replica import Replica
from evermoe.copies.replay.sender import GradientSender

BATCH = 8


def gradients(elements):
    """Return float32 gradients by name; None stands for no gradient."""
    random = torch.Generator().manual_seed(0)
    dense = torch.randn(elements, generator=random) * 1e-3
    mixed = dense.clone()
    mixed[: elements // 2] = 0.0
    return {
        "float32": dense,
        "bfloat16": dense.bfloat16().float(),
        "half zeros": mixed,
        "zeros": torch.zeros(elements),
        "None": None,
    }


class Trainer:
    """A trainer of one parameter, whose gradient is the same in each step."""

    def __init__(self, gradient, elements):
        self.p = torch.nn.Parameter(torch.zeros(elements))
        self.optimizer = optim.AdamW([self.p])
        self.sender = GradientSender(self.optimizer, {"unit": {"p": self.p}})
        self.step_number = -1
        self.p.grad = torch.zeros(elements)
        self.full_bytes = len(self.step())
        self.p.grad = gradient

    def step(self):
        """Take a step. Return its message."""
        self.optimizer.step()
        self.step_number += 1
        return self.sender.messages(self.step_number)[0]


class Receiver:
    """A log that receives the same batch of messages repeatedly. Its unit has hardly any state."""

    def __init__(self, messages, elements):
        self.messages, self.elements = messages, elements
        self.state = np.zeros(RECORD_HEADER_BYTES + 4, np.uint8)
        before = int.from_bytes(messages[0][16:24].tobytes(), "little") - 1
        about = {"name": "unit/p", "step": before, "t": 0, "elements": elements, "numbers": [], "payload": None}
        seal_record(self.state, kind="full_state", **about)

    def receive(self):
        log = ReplayLog([("unit/p", self.elements, 4)], 1 << 40)
        assert log.accept(self.state)[0] == "state"
        log.installed(0)
        for message in self.messages:
            assert log.accept(message)[0] == "ok"
        return log


def measure(table, arguments, name, gradient, threads):
    torch.set_num_threads(threads)
    elements = arguments.elements
    trainer, plain = Trainer(gradient, elements), torch.nn.Parameter(torch.zeros(elements))
    plain.grad = gradient
    messages = [trainer.step().copy() for _ in range(BATCH)]
    receiver = Receiver(messages, elements)
    _, _, t, numbers, gradients, *_ = receiver.receive().take(0, BATCH, 1 << 60) or (None,) * 7
    payloads = [each.view(np.uint8) for each in gradients or () if each is not None]
    source, target = torch.ones(elements), torch.empty(elements)
    part = Replica(trainer.sender.layouts())._parts[0]
    part.install_state(torch.zeros(part.layout.nbytes, dtype=torch.uint8))
    timed = {
        "memcpy": lambda: target.copy_(source),
        "step": optim.AdamW([plain]).step,
        "step and messages": trainer.step,
        "receive": receiver.receive,
        "apply": lambda: part.apply_steps(numbers, gradients, t),
        "checks": lambda: (part.check_seal(), part.seal_state(), [state_digest([each]) for each in payloads]),
    }
    if gradient is not None:
        record, values = np.empty(RECORD_HEADER_BYTES + 4 * elements, np.uint8), gradient.numpy()
        timed["encode"] = lambda: encode_gradient(values, numbers[:10].tolist(), record)
    times = take_turns(timed, arguments.seconds)
    has_work = gradient is not None
    table.add(
        gradient=name,
        threads=threads,
        bytes=len(messages[0]) / elements,
        full=trainer.full_bytes / elements,
        memcpy_ms=medians(times)["memcpy"] / 1e3,
        encode=ratio(times, "encode", "memcpy") if has_work else None,
        receive=ratio(times, "receive", "memcpy") / BATCH,
        apply=ratio(times, "apply", "memcpy") / BATCH if has_work else None,
        checks=ratio(times, "checks", "memcpy") / BATCH if has_work else None,
        of_step=ratio(times, "step and messages", "step") - 1 if has_work else None,
    )


def main():
    made = parser(__doc__, seconds=5, devices=("cpu",))
    made.add_argument("--elements", type=int, default=1 << 23)
    arguments = parse(made)
    columns = {"gradient": ">10s", "threads": "7d", "bytes": "8.3f", "full": "6.1f", "memcpy_ms": "9.2f"}
    columns |= {"encode": "7.2f", "receive": "8.2f", "apply": "7.2f", "checks": "7.2f", "of_step": "8.2f"}
    table = Table(f"Replica of {arguments.elements} parameters; bytes for each, times as ratios", columns)
    for threads in arguments.threads:
        for name, gradient in gradients(arguments.elements).items():
            measure(table, arguments, name, gradient, threads)
    table.write(arguments)


if __name__ == "__main__":
    main()
