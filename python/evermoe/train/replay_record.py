"""What a member has recorded of its protocol, checked: the machine that ran is the one that is explored."""

from __future__ import annotations

from evermoe import _native


def check_record(record: list[tuple[str, str]]) -> None:
    """Feeds what a member has recorded to the machine again, which must give the same commands.

    Args:
        record: what `on_record` was told, from the start.

    Raises:
        ValueError: the machine gives another command than the one that was carried out.
    """
    machine = _native.Protocol(record[0][0])
    for number, (event, commands) in enumerate(record[1:]):
        found = machine.handle(event)
        if found != commands:
            raise ValueError(f"event {number}, {event}: the protocol gives {found}, recorded was {commands}")
