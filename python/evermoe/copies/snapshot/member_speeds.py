"""Speeds of a member, as it has measured them."""

from __future__ import annotations

from collections.abc import Sequence

from evermoe.comm.courier import Courier, Sent
from evermoe.copies.snapshot.link import measure_link
from evermoe.planning.schedule import DEFAULT_LINK, Link
from evermoe.planning.windows import Windows

RECENT = 32
"""Minimum number of messages that measure the link: the latest half, or at least these. The first messages wait for
memory that was never touched."""


class MemberSpeeds:
    """Speeds of a member's link, of its captures and of its steps.

    Args:
        courier: sends the snapshots.
    """

    def __init__(self, courier: Courier) -> None:
        self.couriers: Sequence[Courier] = [courier]
        """Couriers whose messages measure the link, and appear in traces."""
        self.link: tuple[float, float] | None = None
        """Measured latency and bytes per second of this member's link; None before enough messages were sent."""
        self.host = 0.0
        """Bytes per second of the latest capture; 0 before the first one."""
        self.step_seconds: float | None = None
        """Seconds of a step, from the latest profile, also one of earlier members."""
        self.network_seconds: float | None = None
        """Idle seconds of this member's network in a step, from the same profile."""

    def sent_messages(self) -> list[Sent]:
        """Return the latest messages of all couriers."""
        return [each for courier in self.couriers for each in list(courier.sent)]

    def measure_link(self) -> Link:
        """Measure the link by the latest messages; return `DEFAULT_LINK` before enough were sent."""
        every = sorted(self.sent_messages(), key=lambda each: each.end)
        link = measure_link(every[-max(RECENT, len(every) // 2) :], DEFAULT_LINK)
        if link != DEFAULT_LINK:
            self.link = link.alpha, link.beta
        return link

    def use_link(self, link: Link) -> None:
        """Let the couriers expect this link's times."""
        for courier in self.couriers:
            courier.link = link

    def note_profile(self, windows: Windows) -> None:
        """Note the times of a step in which these windows were found."""
        idle = [window.seconds for window in windows.windows if window.resource == "network"]
        self.step_seconds, self.network_seconds = windows.step_seconds, sum(idle)
