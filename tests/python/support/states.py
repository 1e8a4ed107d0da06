"""States with which replicas begin, as a member sends them and takes them over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from support import traffic
from support.worker import Recorder


def watch(record: Recorder) -> None:
    """Records which nodes have each unit as a plan begins, and from then on each message that is sent or taken over.

    Faults may happen at the point `state`, before a state is sent; and at `state of n` where there are n members.
    """
    assert record.session is not None
    traffic.watch(record)
    protection, nodes = record.session._protection, record.session._membership.nodes
    copies, replicas = protection.first._copies, protection.replicas._now
    assert replicas is not None
    holders = {
        unit: {*active, *(rank for rank in range(len(nodes)) if unit in copies.at(rank))}
        for unit, active in protection.active.items()
    }
    record.write(
        "risk",
        rank=record.session._membership.everyone.rank,
        nodes={unit: sorted({nodes[rank] for rank in ranks}) for unit, ranks in holders.items()},
        tokens=record.session._state.expert_load.by_unit(),
        replicas={each.unit: each.holders for each in protection.plan.units if each.kind == "replayed"},
    )
    sender, replica = replicas.copies.sender, replicas.copies.replica
    make, receive = sender.full_state_messages, replica.receive

    def make_noted(step: int, units: Iterable[str] | None = None, memory: Any = None) -> Iterator[tuple[str, Any]]:
        for unit, message in make(step, units, memory):
            record.write("state", unit=unit, at=step)
            record.fault("state", step)
            record.fault(f"state of {len(nodes)}", step)
            yield unit, message

    def receive_noted(message: Any, **options: Any) -> Any:
        received = receive(message, **options)
        record.write("taken", unit=received.unit, code=received.code)
        return received

    sender.full_state_messages = make_noted  # type: ignore[method-assign]
    replica.receive = receive_noted  # type: ignore[method-assign]
