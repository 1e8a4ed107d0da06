"""Log lines about members: one when a member is lost, one when training resumes after a loss or a join.

They have the level WARNING, so that a job shows them without any configuration of `logging`. Only rank 0 writes them:
all members have the same information, and a job may have a thousand of them.
"""

from __future__ import annotations

import logging

from evermoe.events import MemberLost, Recovered
from evermoe.options import count

logger = logging.getLogger("evermoe")
JOINED = "new members"
"""`Recovered.reason` after a join."""
REMAINS = {
    "left": "it has left the job",
    "process": "its process has ended, its host answers",
    "hung": "it hangs or is stopped",
    "host": "neither it nor its host answers",
}
"""Description for people, by `MemberLost.kind`."""


def log_lost(event: MemberLost) -> None:
    """Log that a member is lost."""
    left = f"{count(event.members, 'member')} left of {event.wanted}"
    logger.warning("lost %s in step %d: %s; %s", event.member, event.step, REMAINS[event.kind], left)


def log_recovery(event: Recovered) -> None:
    """Log that training resumes after a failure or a join; after a move of experts, at the level INFO."""
    is_shown = event.failure or event.steps_lost or event.stale or event.reason == JOINED
    level = logging.WARNING if is_shown else logging.INFO
    logger.log(level, recovery_line(event))


def recovery_line(event: Recovered) -> str:
    """Return one sentence about a recovery: where training resumes, after how long, and what is lost.

    >>> event = Recovered(0.0, {"agree": 0.07, "fetch": 0.13}, 20, 0, 3, "", 0, 0, {}, 0, 0, [])
    >>> recovery_line(event)
    'training resumes at step 20 with 3 members after 0.20 s (agree 0.07, fetch 0.13); no committed step is lost'
    """
    phases = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in event.seconds.items())
    text = "new members have joined: " if event.reason == JOINED and not event.failure else ""
    text += f"training resumes at step {event.step} with {count(event.members, 'member')}"
    text += f" after {sum(event.seconds.values()):.2f} s ({phases}); "
    text += f"{count(event.steps_lost, 'committed step')} lost" if event.steps_lost else "no committed step is lost"
    if event.stale:
        tokens = sum(event.lost_tokens.values())
        text += f"; {count(len(event.stale), 'expert')} went back to older copies: {tokens:,} tokens lost"
    if event.lost_units:
        text += f"; no copy of {count(len(event.lost_units), 'unit')} was left in memory: the state is a checkpoint's"
    return text
