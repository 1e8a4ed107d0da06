"""A worker that reports the states that it sends as steps begin, and may die while it sends them."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from typing import Any

from evermoe.comm.courier import Courier, Message
from evermoe.copies.replay.early_states import EarlyStates
from support import worker
from support.harness import Worker
from support.worker import Options

MESSAGES = 3
"""That a worker with a fault at `early` begins to send before it dies."""


class EarlyStatesWorker(Worker):
    """Writes an event `early` for each step: bytes of states sent, by when they were begun, and bytes that came.

    A fault at `early` kills it in the middle of the states of that step.
    """

    @staticmethod
    def main(options: Options) -> None:
        exchange, messages = EarlyStates.exchange_states, EarlyStates._messages
        last = [fault.step for fault in options.faults if fault.point == "early"]

        def write(event: str, **fields: Any) -> None:
            with options.events.open("a") as file:
                file.write(json.dumps({"event": event, "pid": os.getpid(), **fields}) + "\n")

        def exchange_and_report(early: EarlyStates, courier: Courier, step: int, *args: Any) -> None:
            before = courier.sent[-1].start if courier.sent else 0
            exchange(early, courier, step, *args)
            sent: Counter[str] = Counter()
            for each in courier.sent:
                sent[each.when] += each.nbytes * (each.start > before)
            write("early", step=step, sent=sent, came=[len(record) for record in early._arrived])

        def messages_until_fault(early: EarlyStates, step: int, *args: Any) -> Iterator[Message]:
            for number, message in enumerate(messages(early, step, *args)):
                if step in last and number == MESSAGES:
                    write("fault", point="early", at=step)
                    os.kill(os.getpid(), signal.SIGKILL)
                yield message

        EarlyStates.exchange_states = exchange_and_report  # type: ignore[method-assign]
        EarlyStates._messages = messages_until_fault  # type: ignore[assignment,method-assign]
        worker.main(options)
