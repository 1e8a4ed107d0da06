"""Several listeners as one, and listeners that environment variables request."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from evermoe.config import environment
from evermoe.events import Event
from evermoe.events.base_event import Listener
from evermoe.observe.metrics import Metrics
from evermoe.observe.tensorboard import TensorBoard
from evermoe.options import checked
from evermoe.process.memory_folder import node_name

MAX_PORT = 65535


def combined(given: Listener | Sequence[Listener], more: Sequence[Listener] = ()) -> Listener:
    """Return one listener that passes each event to all of those given, in their order."""
    listeners = (*([given] if callable(given) else given), *more)
    for each in listeners:
        if not callable(each):
            raise TypeError(f"on_event: expected functions of an event, got {type(each).__name__}")

    def notify(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return notify


def from_environment() -> list[Listener]:
    """Return the listeners that EVERMOE_METRICS and EVERMOE_TENSORBOARD request.

    The port is that of the first process on this machine; the others use the following ones. Each process has a
    subfolder of its own, named after its node and its number on it.

    Raises:
        ValueError: the port is invalid.
        OSError: the port is taken, or the folder cannot be written to; the message names it.
        ModuleNotFoundError: a package is missing: `pip install 'evermoe[observe]'`.
    """
    listeners: list[Listener] = []
    text, number = os.environ.get("EVERMOE_METRICS"), environment.local_rank()
    if text:
        port = checked("EVERMOE_METRICS", int(text) if text.isdecimal() else text, int, least=1, most=MAX_PORT)
        port += number
        try:
            listeners.append(Metrics(port))
        except OSError as error:
            raise OSError(error.errno, f"port {port} (EVERMOE_METRICS): {error.strerror}") from None
    folder = os.environ.get("EVERMOE_TENSORBOARD")
    if folder:
        node = node_name(os.environ.get("EVERMOE_NODE") or None)
        try:
            listeners.append(TensorBoard(Path(folder) / f"{node}-{number}"))
        except OSError as error:
            raise OSError(error.errno, f"{folder} (EVERMOE_TENSORBOARD): {error.strerror}") from None
    return listeners
