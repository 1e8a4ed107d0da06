"""Tags of all messages between members. Messages of one tag between two members keep their order."""

from __future__ import annotations

REPLAY_HEAD, REPLAY_TAIL = 1, 2
"""Records of a step for replicas: the message of a known size, and what it had no room for."""
FETCH = 3
"""Units of a recovery."""
CHECKPOINT = 4
"""What members have written of a checkpoint, and what becomes of it."""
REPLAY_STATES = 5
"""States of before a step for replicas that follow it anew: which, and then they themselves."""
REPLAY_GRADIENTS = 6
"""Records of a step for replicas that are sent while backward computes others."""
MEETING = 7
"""What members are about to do, where they meet between steps; among the messages of `Group.exchange`."""
STEP = 8
"""Notice to replica nodes that a step begins, among the messages of `Group.exchange`."""
SNAPSHOT_FIRST = 16
"""The first tag of snapshots: each bundle has `SNAPSHOT_EACH` of them from here on."""
SNAPSHOT_EACH = 4096
CONNECTED = 0x7FFF_FFFD
"""A pipeline's members tell each other that their groups are connected."""
NEVER_SENT = 0x7FFF_FFFF
"""Tag that is never sent: a wait for it ends all waits, see `waits.end_waits`."""
