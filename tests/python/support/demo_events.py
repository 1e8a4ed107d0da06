"""Events of workers of the demo, made by hand."""

from __future__ import annotations

RECOVERED = {
    "event": "recovered",
    "steps_lost": 0,
    "digests_checked": 10,
    "digests_mismatched": 0,
    "fetched_bytes": 100,
    "fetched_units": 2,
    "sources": {"peer": 2},
    "members": 2,
}
VERIFIED = {"event": "verified", "digests_checked": 5, "digests_mismatched": 0}


def run(steps=8, kill_at=4):
    """Return events of three workers with steps of 1 s.

    Worker 2 dies half a second into step `kill_at`, which the others apply 3 s later.
    """
    events = {worker: [] for worker in range(3)}
    now = 0.0
    for step in range(steps):
        for worker, rows in events.items():
            if worker < 2 or step <= kill_at:
                rows.append({"event": "begin", "time": now, "step": step})
        if step == kill_at:
            events[2].append({"event": "killed", "time": now + 0.5, "step": step})
            for rows in (events[0], events[1]):
                rows.append({"event": "connection_lost", "time": now + 0.6})
                rows.append({"event": "phase", "phase": "agree", "time": now + 0.6})
                rows.append({"event": "phase", "phase": "rebuild", "time": now + 1.0})
                rows.append({"event": "phase", "phase": "fetch", "time": now + 1.2})
                rows.append({"event": "phase", "phase": "verify", "time": now + 1.5})
                rows.append(RECOVERED | {"time": now + 2.0})
            now += 2.5
        now += 1.0
        for worker, rows in events.items():
            if worker < 2 or step < kill_at:
                members = 3 if step < kill_at else 2
                rows.append({"event": "send", "time": now - 0.25, "step": step + 1})
                rows.append({"event": "vote", "time": now, "step": step})
                rows.append({"event": "update", "time": now, "step": step})
                rows.append(
                    {"event": "commit", "time": now, "step": step, "loss": 5.0 - 0.1 * step, "members": members}
                )
    for rows in (events[0], events[1]):
        rows.append(VERIFIED | {"time": now})
    return events
