"""Hardware on which a job admits no newcomers: a member left because it was faulty, and its launcher restarts it.

    a member is named as corrupt, or leaves as sick     every other member adds its hardware to its list
    members write their lists into their messages       so newcomers receive them, and all refuse the same ones
    an operator lifts a quarantine                      members mark it in their lists, and it stays marked

Only the lists of the established members in a set of the Lighthouse count. All members read the same messages, so that
they refuse the same newcomers without a message of their own. A list grows only, and a mark is never removed: lists
that differ for a while merge to the same one. It lives as long as a member of the job does: a job that
is started again, perhaps after repairs, begins without one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

logger = logging.getLogger(__name__)

MAX_QUARANTINES = 256
"""Most entries of a list. The Lighthouse's answer, which has all members' messages, must be smaller than 4 MiB."""
MAX_WHY = 200
"""Most characters of a reason."""
WRITERS = 8
"""Members that write their lists into their messages, at least; fewer than twice as many do."""


@dataclass(frozen=True)
class Quarantine:
    """Refuses newcomers on some hardware. The fields are those of `Quarantine` in `src/protocol/message.rs`."""

    member: str
    """Id of the member that left."""
    node: str
    hardware: str
    """UUID of its GPU; its node if it has none."""
    why: str
    is_lifted: bool = False

    def has_name(self, name: str) -> bool:
        """Return whether an operator's name means this quarantine: the member, its node or its hardware."""
        return name in (self.member, self.node, self.hardware)

    def __str__(self) -> str:
        where = self.node if self.hardware == self.node else f"{self.hardware} of {self.node}"
        return f"{where}, which {self.member} has left: {self.why}"


class Quarantines:
    """A member's list, by the id of the member that left."""

    def __init__(self) -> None:
        self._by_member: dict[str, Quarantine] = {}
        self._is_written = True

    def choose_writers(self, rank: int, size: int) -> None:
        """Write the list if this member, of this many, is one of those that do: they are spread over all nodes."""
        self._is_written = rank % max(1, size // WRITERS) == 0

    def __iter__(self) -> Iterator[Quarantine]:
        return iter(self._by_member.values())

    def fields(self) -> list[dict[str, Any]]:
        """Return the list as it is written into messages."""
        return [asdict(each) for each in self] if self._is_written else []

    def add(self, found: Quarantine) -> None:
        """Add a quarantine, and log it."""
        if found.member not in self._by_member and len(self._by_member) < MAX_QUARANTINES:
            self._by_member[found.member] = found = replace(found, why=found.why[:MAX_WHY])
            logger.warning("quarantine: newcomers are refused on %s", found)

    def merge(self, said: Iterable[Quarantine]) -> None:
        """Add what other members know: quarantines, and that some are lifted."""
        for each in said:
            if len(self._by_member) < MAX_QUARANTINES or each.member in self._by_member:
                known = self._by_member.get(each.member, each)
                self._by_member[each.member] = replace(known, is_lifted=known.is_lifted or each.is_lifted)


def merged(lists: Iterable[Iterable[Mapping[str, Any]]], lifted: Iterable[str] = ()) -> list[Quarantine]:
    """Return the quarantines of several members' messages; those with a name in `lifted` are lifted.

    >>> one = {"member": "a-1", "node": "a", "hardware": "GPU-7", "why": "Xid 79", "is_lifted": False}
    >>> [each.is_lifted for each in merged([[one], [one | {"is_lifted": True}]])], merged([[one]], ["a"])[0].is_lifted
    ([True], True)
    """
    known, names = Quarantines(), set(lifted)
    known.merge(Quarantine(**each) for fields in lists for each in fields)
    return [replace(each, is_lifted=each.is_lifted or any(map(each.has_name, names))) for each in known]


def against(hardware: str, quarantines: Iterable[Quarantine]) -> Quarantine | None:
    """Return the quarantine that refuses newcomers on this hardware; None without one."""
    return next((each for each in quarantines if each.hardware == hardware and not each.is_lifted), None)


def find_hardware(node: str, device: torch.device) -> str:
    """Return the hardware of a member: the UUID of its GPU as NVML writes it, and without a GPU its node."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
    return f"GPU-{uuid}" if uuid.strip("0-") else node
