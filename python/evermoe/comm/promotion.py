"""An operator's word to members that wait for a majority: they go on without it."""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta
from typing import Any

from evermoe import _native
from evermoe.comm._torchft import torchft
from evermoe.comm.messages import as_text, job_secret
from evermoe.config.membership import split_addresses
from evermoe.options import check_name

ANSWER_LIMIT = timedelta(seconds=5)
"""Time after which a question is asked again: the Lighthouse waits for all that are alive."""
RETRY_SECONDS = 0.1
"""Time between two questions."""


def promote(address: str, job: str, limit: float) -> list[str]:
    """Tells the members of a job that ask a Lighthouse to go on though others may be missing.

    Args:
        address: of the Lighthouse, `http://host:port`.
        job: name of the job.
        limit: seconds to wait until they do.

    Returns:
        ids of the members that go on, or that have heard it and ask no more.

    Raises:
        ValueError: the address or the name is wrong, no member has asked within the limit, or the members train
            already.
    """
    if len(split_addresses(address)) > 1:
        raise ValueError(f"expected the address of the one Lighthouse that the members shall ask, got {address}")
    check_name("--job", job)
    who, own, deadline = f"promote-{uuid.uuid4().hex[:8]}", job_secret(), time.monotonic() + limit
    generation: int | None = None
    problem, told = f"no member of job {job!r} has asked there", list[str]()
    members: dict[str, dict[str, Any]] = {}
    while time.monotonic() < deadline:
        data = json.loads(_native.encode_promotion(who, job, generation, own))
        try:
            client = torchft().coordination.LighthouseClient(address, ANSWER_LIMIT)
            answer = client.quorum(who, ANSWER_LIMIT, world_size=1, data=data)
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            problem = str(error).split("\n", 1)[0]
            time.sleep(RETRY_SECONDS)
            continue
        members = _members(answer, job, own)
        trains = sorted(name for name, message in members.items() if message["standing"]["epoch"] is not None)
        if trains:
            if told:
                return trains
            raise ValueError(f"{', '.join(trains)} of job {job!r} train: there is nothing to promote at {address}")
        if members:
            newest = max(message["standing"]["generation"] for message in members.values())
            told = sorted(members) if newest == generation else told
            generation = newest  # from the next question on
            problem = f"{', '.join(sorted(members))} of job {job!r} did not go on"
        time.sleep(RETRY_SECONDS)
    if told and not members:
        return told  # they have heard it and ask no more: the job ended soon after
    raise ValueError(f"{address}: {problem} within {limit:.0f} s")


def _members(answer: Any, job: str, own: _native.Secret | None) -> dict[str, dict[str, Any]]:
    """By id, what each member of the job has told."""
    heard = {
        each.replica_id: json.loads(_native.decode_message(each.replica_id, as_text(each.data), own))
        for each in answer.participants
    }
    return {name: told["message"] for name, told in heard.items() if told["kind"] == "member" and told["job"] == job}
