"""Tags of all messages between members. Messages with the same tag between two members keep their order."""

from __future__ import annotations

REPLAY_HEAD, REPLAY_TAIL = 1, 2
"""Records of a step for replicas: the message of fixed size, and the overflow."""
FETCH = 3
"""Units of a recovery."""
CHECKPOINT = 4
"""Progress of a checkpoint: the members' reports, and the decision on it."""
REPLAY_STATES = 5
"""State before a step, for replicas that start to follow it: first the list of units, then their state."""
REPLAY_GRADIENTS = 6
"""Records of a step for replicas that are sent while backward computes others."""
MEETING = 7
"""Next action of each member at a meeting between steps; sent by `Group.exchange`."""
STEP = 8
"""Notification of replica nodes that a step begins; sent by `Group.exchange`."""
SAVE = 9
"""Progress of a save of some units; as `CHECKPOINT`, which may be under way at the same time."""
PROBE = 10
"""Messages whose time shows how fast the network of a host is."""
CALL = 11
"""A call of a member that another one repeats; sent by `Group.exchange`."""
DISPUTE = 12
"""Steps of a replica that another member repeats; sent by `Group.exchange`."""
SNAPSHOT_FIRST = 16
"""First tag of snapshots: from here on, each bundle has `SNAPSHOT_EACH` tags."""
SNAPSHOT_EACH = 4096
CONNECTED = 0x7FFF_FFFD
"""Notification among a pipeline's members that their groups are connected."""
NEVER_SENT = 0x7FFF_FFFF
"""Tag that is never sent: a wait for it ends all waits, see `torch_groups.end_waits`."""
