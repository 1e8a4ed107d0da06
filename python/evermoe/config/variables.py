"""Options from environment variables: those that fields name, and those of launchers."""

from __future__ import annotations

import os
import types
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from evermoe.config import environment
from evermoe.config.membership import Membership
from evermoe.options import Options, checked

_Options = TypeVar("_Options", bound=Options)


def from_environment(options: _Options) -> _Options:
    """Return the options with each field that has its default read from its environment variable, where that is set.

    Raises:
        ValueError: a variable is wrong; the message names it.
    """
    hints, found = get_type_hints(type(options)), {}
    for each in fields(options):
        variable = each.metadata.get("env")
        if variable and getattr(options, each.name) == each.default and (text := os.environ.get(variable)):
            found[each.name] = _parsed(variable, text, hints[each.name], each.metadata["limits"])
    return replace(options, **found)


def _parsed(variable: str, text: str, hint: Any, limits: dict[str, Any]) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if bool in kinds:
        return checked(variable, text, Literal["0", "1"]) == "1"
    if int in kinds:
        return checked(variable, int(text) if text.isdecimal() else text, int, **limits)
    return checked(variable, text, hint, **limits)


def find_membership(given: Membership | None) -> Membership:
    """Return the membership with what was not given read from `EVERMOE_*` variables, then from those of a launcher.

    Raises:
        ValueError: a variable is wrong, the job has no name, a spare has no Lighthouse, or a launcher has started
            several processes without a Lighthouse, which would not find each other.
    """
    given = checked("membership", given, Membership | None) or Membership()
    found = _with_launcher(from_environment(given))
    if found.role == "spare" and found.lighthouse is None:
        raise ValueError(
            "role='spare' (EVERMOE_ROLE) waits to replace a member of a job: expected lighthouse "
            "(EVERMOE_LIGHTHOUSE) to be the address of the job's Lighthouse, got None"
        )
    return found


def _with_launcher(given: Membership) -> Membership:
    """Return the membership with what torchrun, srun or a user of torchft sets for a job of several processes."""
    lighthouse = given.lighthouse or environment.lighthouse()
    if lighthouse is None:
        others = environment.others()
        if others and given.members != 1:
            raise ValueError(
                f"{others}, but no Lighthouse is named: each process would train a job of its own. Start the workers "
                "with `evermoe run`; or start a Lighthouse that outlives them, `torchft_lighthouse --bind "
                "0.0.0.0:29510 --min_replicas 1`, and set TORCHFT_LIGHTHOUSE=http://HOST:29510 for all of them; or, "
                "for jobs of one process each, set EVERMOE_MEMBERS=1"
            )
        return given
    job = given.job or environment.job()
    if job is None:
        raise ValueError(
            "lighthouse (EVERMOE_LIGHTHOUSE) is set, so job (EVERMOE_JOB) must name the job, the same for all; "
            f"{', '.join(environment.JOBS)} do not (torchrun: --rdzv-id)"
        )
    domain, members = given.domain or environment.domain(), given.members or environment.processes()
    return replace(given, lighthouse=lighthouse, job=job, domain=domain, members=members)
