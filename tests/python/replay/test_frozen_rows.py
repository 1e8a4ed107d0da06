"""Frozen parameters on their trainer and on a replica."""

import torch

from evermoe.copies.replay.replica import Replica
from evermoe.copies.replay.sender import GradientSender, Row


def test_a_frozen_row_that_is_in_no_optimizer_costs_a_header_until_a_script_writes_it():
    """Its bytes come again then, and its steps are none; nothing reads it to compare digests."""
    trained, frozen = torch.nn.Parameter(torch.zeros(8)), torch.nn.Parameter(torch.randn(2, 64), requires_grad=False)
    optimizer = torch.optim.SGD([trained], lr=0.1)
    sender = GradientSender(optimizer, {"a": {"weights": Row(frozen, 1)}, "b": {"weight": trained}}, is_hooked=False)
    with Replica(sender.layouts()[:1]) as replica:
        sizes = []
        for step in range(1, 12):
            if step == 6:
                with torch.no_grad():
                    frozen.add_(1.0)
            messages = [data for unit, data in sender.next_step_messages(step, ["a"])]
            sizes.append(sum(map(len, messages)))
            for data in messages:
                assert replica.receive(data, hold=True).code == "ok"
            sender.on_step()
            replica.release_held()
            if step == 8:  # thawed, but no optimizer steps it
                frozen.requires_grad_(True).grad = torch.ones_like(frozen)
            assert step >= 8 or all(source.parameter is trained for source in sender.turns.choose(1))
            assert replica.catch_up("a").step == step
            assert torch.equal(replica.catch_up("a").state, frozen.detach()[1].view(torch.uint8))
    full, header = sizes[0], sizes[1]
    assert sizes == [full, *[header] * 4, full, *[header] * 5]
    assert header < 128 < frozen[1].nbytes < full
