"""Promotion by an operator: members that wait for a majority resume without it."""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta
from typing import Any

from evermoe import _native
from evermoe.comm._torchft import coordination
from evermoe.comm.messages import as_text, job_secret
from evermoe.config.membership import split_addresses
from evermoe.options import check_name

ANSWER_LIMIT = timedelta(seconds=5)
"""Time after which a request is repeated: the Lighthouse waits for all processes that are alive."""
RETRY_SECONDS = 0.1
"""Time between two requests."""


def promote(address: str, job: str, limit: float) -> list[str]:
    """Promote the members of a job that wait at a Lighthouse: they resume although others may be missing.

    Args:
        address: address of the Lighthouse, `http://host:port`.
        job: name of the job.
        limit: seconds to wait until they resume.

    Returns:
        ids of the members that resume, or that have received the promotion and left.

    Raises:
        ValueError: the address or the name is wrong, no member has contacted the Lighthouse within the limit, or the
            members are already training.
    """
    if len(split_addresses(address)) > 1:
        raise ValueError(f"expected the address of one Lighthouse, the one that the members should use, got {address}")
    check_name("--job", job)
    who, own, deadline = f"promote-{uuid.uuid4().hex[:8]}", job_secret(), time.monotonic() + limit
    generation: int | None = None
    problem, promoted = f"no member of job {job!r} has contacted the Lighthouse", list[str]()
    members: dict[str, dict[str, Any]] = {}
    while time.monotonic() < deadline:
        data = json.loads(_native.encode_promotion(who, job, generation, own))
        try:
            client = coordination().LighthouseClient(address, ANSWER_LIMIT)
            answer = client.quorum(who, ANSWER_LIMIT, world_size=1, data=data)
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            problem = str(error).split("\n", 1)[0]
            time.sleep(RETRY_SECONDS)
            continue
        members = _members(answer, job, own)
        trains = sorted(name for name, message in members.items() if message["standing"]["epoch"] is not None)
        if trains:
            if promoted:
                return trains
            raise ValueError(f"{', '.join(trains)} of job {job!r} train: there is nothing to promote at {address}")
        if members:
            newest = max(message["standing"]["generation"] for message in members.values())
            promoted = sorted(members) if newest == generation else promoted
            generation = newest  # from the next request on
            problem = f"{', '.join(sorted(members))} of job {job!r} did not resume"
        time.sleep(RETRY_SECONDS)
    if promoted and not members:
        return promoted  # they resumed, and the job ended soon after
    raise ValueError(f"{address}: {problem} within {limit:.0f} s")


def _members(answer: Any, job: str, own: _native.Secret | None) -> dict[str, dict[str, Any]]:
    """Return the messages of the job's members, by id."""
    decoded = {
        each.replica_id: json.loads(_native.decode_message(each.replica_id, as_text(each.data), own))
        for each in answer.participants
    }
    return {name: each["message"] for name, each in decoded.items() if each["kind"] == "member" and each["job"] == job}
