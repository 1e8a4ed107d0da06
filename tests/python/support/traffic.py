"""Bytes that members send after a change of members or of places, and what plans say that they should be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from evermoe.comm.tags import FETCH, REPLAY_TAIL
from support.harness import Event, Worker


def watch(record: Any) -> None:
    """Records, as a plan begins, which nodes have each unit under it; and each state that is sent from then on.

    Gradients of steps are no states: they travel whether members change or not.
    """
    session = record.session
    protection, nodes = session._protection, session._membership.nodes
    holders = {unit: {nodes[rank] for rank in ranks} for unit, ranks in protection.active.items()}
    trainers = {unit: sorted(found) for unit, found in holders.items()}
    for each in protection.plan.units:
        assert each.kind in ("active", "replayed"), "snapshots travel whether members change or not"
        holders[each.unit] |= {nodes[rank] for rank in each.holders}
    sizes = dict(session._state.catalog.sizes())
    every = {unit: sorted(found) for unit, found in holders.items()}
    record.write("holders", nodes=every, trainers=trainers, sizes=sizes)
    transport = session._membership.transport
    send = transport.send
    if send.__name__ == "send_noted":
        return

    def send_noted(tensor: Any, destination: int, tag: int) -> Any:
        if tag in (FETCH, REPLAY_TAIL):
            record.write("message", nbytes=tensor.nbytes)
        return send(tensor, destination, tag)

    transport.send = send_noted


def changed_bytes(before: Event, after: Event) -> int:
    """Bytes of all units at the nodes that have them under a plan, and had them neither as a copy nor to train."""
    return sum(
        before["sizes"][unit] * len({*nodes} - {*before["nodes"][unit]}) for unit, nodes in after["nodes"].items()
    )


def copied_bytes(plan: Event, units: Iterable[str]) -> int:
    """Bytes of all copies of these units under a plan, at nodes that do not train them."""
    return sum(plan["sizes"][unit] * len({*plan["nodes"][unit]} - {*plan["trainers"][unit]}) for unit in units)


def recoveries(worker: Worker) -> list[tuple[Event, int]]:
    """Each recovery of a worker: its plan, and the bytes sent until the first commit after it."""
    found, events = [], worker.events()
    begins = [at for at, event in enumerate(events) if event["event"] == "phase" and event["phase"] == "fetch"]
    for begin, end in zip(begins, [*begins[1:], len(events)], strict=True):
        since = events[begin:end]
        plan = next(event for event in since if event["event"] == "holders")
        until = next(at for at, event in enumerate(since) if event["event"] == "commit")
        sent = sum(event["nbytes"] for event in since[:until] if event["event"] == "message")
        found.append((plan, sent))
    return found
