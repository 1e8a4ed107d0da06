"""Limits what the TCP connections of this process send, as a slow network card would."""

from __future__ import annotations

import contextlib
import os
import socket
import struct

RATE = 10_000_000
"""Bytes per second of a connection."""
NO_LIMIT = 0xFFFFFFFF
_SO_MAX_PACING_RATE = 47
"""Linux's number of the option, which `socket` does not name."""


def limit_connections(bytes_per_second: int = RATE) -> None:
    """Let the kernel send no more than this on each connection that exists now."""
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # no socket, or none of TCP
            if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(number))) as connection:
                    connection.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("I", bytes_per_second))
