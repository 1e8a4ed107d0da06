"""Quarantines of a running job, for an operator: list them, and lift some."""

from __future__ import annotations

import json
import time
import uuid
from typing import Any

from evermoe import _native
from evermoe.comm._torchft import coordination
from evermoe.comm.messages import as_text, job_secret
from evermoe.comm.promotion import ANSWER_LIMIT, RETRY_SECONDS
from evermoe.comm.quarantine import Quarantine, merged
from evermoe.config.membership import split_addresses
from evermoe.options import check_name


def find_quarantines(address: str, job: str, limit: float, lift: str = "") -> list[Quarantine]:
    """Return the quarantines of a job, or lift some and return these.

    Args:
        address: address of the Lighthouse that the job uses, `http://host:port`.
        job: name of the job.
        limit: seconds to wait for its members, which ask the Lighthouse once in `join_interval` steps.
        lift: the member, node or hardware that the lifted quarantines name; empty: lift none.

    Raises:
        ValueError: the address or the name is wrong, no member of the job has answered or lifted the quarantines within
            the limit, or no quarantine has that name.
    """
    if len(split_addresses(address)) > 1:
        raise ValueError(f"expected the address of one Lighthouse, the one that the members use, got {address}")
    check_name("--job", job)
    who, own, deadline = f"lift-{uuid.uuid4().hex[:8]}", job_secret(), time.monotonic() + limit
    problem = f"no member of job {job!r} has contacted the Lighthouse"
    while time.monotonic() < deadline:
        try:
            client = coordination().LighthouseClient(address, ANSWER_LIMIT)
            data = json.loads(_native.encode_lift(who, job, lift, own))
            answer = client.quorum(who, ANSWER_LIMIT, world_size=1, data=data)
        except (RuntimeError, TimeoutError, ConnectionError) as error:
            problem = str(error).split("\n", 1)[0]
            time.sleep(RETRY_SECONDS)
            continue
        lists = _lists(answer, job, own)
        found = merged(lists)
        named = [each for each in found if not lift or each.has_name(lift)]
        if lists and lift and not named:
            names = ", ".join(sorted({each.hardware for each in found})) or "it has none"
            raise ValueError(f"no quarantine of job {job!r} names {lift!r}: {names}")
        if lists and all(each.is_lifted for each in named if lift):
            return named
        problem = f"the members of job {job!r} have not confirmed it" if lists else problem
        time.sleep(RETRY_SECONDS)
    raise ValueError(f"{address}: {problem} within {limit:.0f} s")


def _lists(answer: Any, job: str, own: _native.Secret | None) -> list[list[dict[str, Any]]]:
    """Return the quarantines of each member that has state of the job."""
    texts = (
        json.loads(_native.decode_message(each.replica_id, as_text(each.data), own)) for each in answer.participants
    )
    members = [each["message"] for each in texts if each["kind"] == "member" and each["job"] == job]
    return [each["quarantined"] for each in members if each["standing"]["established"]]
