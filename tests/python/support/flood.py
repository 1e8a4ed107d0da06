"""A GPU's stream that takes no more work, so that the host waits in a launch."""

from __future__ import annotations

from evermoe.comm.group import Group
from support import stand_in

WORKS = 1500
"""More than a stream takes."""


def flood_behind_next_collective(group: Group) -> None:
    """Launch more than the stream takes once the group's next collective is launched."""
    before = group.on_end

    def on_end(name: str, on_stream: bool) -> None:
        before(name, on_stream)
        group.on_end = before
        for _ in range(WORKS):
            stand_in.sleep(1)

    group.on_end = on_end
