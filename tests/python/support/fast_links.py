"""A worker whose messages seem to travel over a fast network card."""

from __future__ import annotations

from collections.abc import Sequence

from evermoe.comm.courier import Sent
from evermoe.copies.snapshot import link, member_speeds
from evermoe.copies.snapshot.link import MIN_SAMPLES
from evermoe.planning.schedule import Link
from support import worker
from support.harness import Worker
from support.worker import Options

FAST = Link(5e-5, 5e10)
"""Of 400 Gb/s."""
SMALLEST, LARGEST = 64 << 10, 1 << 20
"""Its messages are as much smaller than usual as its model is."""


class FastLinkWorker(Worker):
    """Takes its link for a fast one once it has sent as many messages as a measurement needs."""

    @staticmethod
    def main(options: Options) -> None:
        def fast_link(sent: Sequence[Sent], default: Link) -> Link:
            return FAST if len(sent) >= MIN_SAMPLES else default

        link.MIN_MESSAGE_BYTES, link.MAX_MESSAGE_BYTES = SMALLEST, LARGEST
        member_speeds.measure_link = fast_link  # type: ignore[assignment]
        worker.main(options)
