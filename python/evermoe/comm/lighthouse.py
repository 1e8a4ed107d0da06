"""torchft's Lighthouse, which decides who is alive, started from here."""

from __future__ import annotations

from typing import Any

from evermoe.comm._torchft import torchft


def start_local_lighthouse(*, heartbeat_limit: float, join_limit: float) -> tuple[Any, str]:
    """A Lighthouse that only this machine can reach, and its address."""
    server = start_lighthouse(heartbeat_limit=heartbeat_limit, join_limit=join_limit, bind="127.0.0.1:0")
    return server, f"http://127.0.0.1:{server.address().rsplit(':', 1)[1]}"


def start_lighthouse(*, heartbeat_limit: float, join_limit: float, bind: str = "0.0.0.0:0") -> Any:
    """Starts torchft's Lighthouse inside this process; `.address()` is what members need, `.shutdown()` ends it.

    Args:
        heartbeat_limit: seconds without a heartbeat after which a member counts as dead.
        join_limit: seconds that a quorum waits for a member that beats but does not ask (busy, or hung).
        bind: `host:port` to listen on; port 0 picks a free one.
    """
    return torchft().coordination.LighthouseServer(
        bind=bind,
        min_replicas=1,
        join_timeout_ms=round(join_limit * 1000),
        quorum_tick_ms=20,
        heartbeat_timeout_ms=round(heartbeat_limit * 1000),
    )
