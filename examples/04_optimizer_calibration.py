"""Optimizers whose steps can be repeated bit for bit elsewhere, and a replica that repeats them.

    python examples/04_optimizer_calibration.py

`calibrate` runs an optimizer on scratch tensors and returns the arithmetic that it follows. If its steps can be
repeated, a replica receives the state once and then only gradients. Here the replica is in the same process; after
every step it has the same bits as the trainer.
"""

import torch
from torch import nn

import evermoe
from evermoe.copies.replay.calibrate import calibrate
from evermoe.copies.replay.replica import Replica
from evermoe.copies.replay.sender import GradientSender


def try_optimizers(parameters):
    """Print the result of `calibrate` for four optimizers."""
    for name, optimizer in {
        "evermoe.optim.AdamW": evermoe.optim.AdamW(parameters, lr=1e-2),
        "torch AdamW, fused": torch.optim.AdamW(parameters, lr=1e-2, fused=True),
        "torch AdamW, foreach": torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
        "torch Adagrad": torch.optim.Adagrad(parameters, lr=1e-2),
    }.items():
        try:
            print(f"{name:21} can be repeated: {calibrate(optimizer).variant}")
        except evermoe.errors.NotReplayable as reason:
            print(f"{name:21} is sent as a state: {str(reason)[:90]}...")


def main():
    """Calibrate, then repeat 20 steps of a trainer."""
    torch.manual_seed(0)
    model = nn.Linear(64, 32)
    try_optimizers(list(model.parameters()))

    optimizer = evermoe.optim.AdamW(model.parameters(), lr=1e-2)
    sender = GradientSender(optimizer, {"model": dict(model.named_parameters())})
    sent = []
    with Replica(sender.layouts()) as replica:
        for step in range(1, 21):
            optimizer.zero_grad()
            model(torch.randn(128, 64)).square().mean().backward()
            optimizer.step()
            sent.append(0)
            for message in sender.messages(step):  # any transport can send these bytes
                received = replica.receive(message)
                sent[-1] += len(message)
                if received.needs_full_state:
                    sender.request_full_state(received.unit)
        state = replica.catch_up("model", 20)
    print(f"first message {sent[0]} bytes (the state), then {sent[-1]} bytes a step (the gradients)")

    parameters = sum(p.numel() for p in model.parameters())
    same = torch.equal(weights_of(state.state, sender), torch.cat([p.detach().flatten() for p in model.parameters()]))
    print(f"after step {state.step} the replica of {parameters} parameters has the trainer's bits: {same}")
    assert same
    sender.close()


def weights_of(data, sender):
    """Return the weights in a unit's bytes, without the optimizer's state."""
    (unit,) = sender.layouts()
    tensors = unit.tensors(data)
    return torch.cat([tensors[name].flatten() for name in ("weight", "bias")])


if __name__ == "__main__":
    main()
