"""A member's message to the Lighthouse, for tests that speak to it without a session."""

from __future__ import annotations

from typing import Any

from evermoe.comm.messages import Messages


def told(messages: Messages, generation: int, steps: int = 9, is_established: bool = True) -> dict[str, Any]:
    """The message of a member that waits; the newest generation that it knows is this one."""
    standing = {
        "epoch": None,
        "established": is_established,
        "size": 2,
        "generation": generation,
        "state": 1,
        "has_progress": True,
        "named": [],
        "adopted": 1,
        "inquires": False,
        "is_done": False,
        "is_spare": False,
        "last_group": None,
        "known": 0,
        "begun": [],
    }
    addresses = {
        "store": "localhost:1",
        "probe_address": "localhost:2",
        "transport": "localhost:3",
        "node": "n",
        "domain": "",
        "rank_key": "",
        "island": None,
        "unreachable": [],
    }
    return messages.write_message(
        {"standing": standing, "waits": True, "role": "train", "steps": steps, "patience": 0.0} | addresses
    )
