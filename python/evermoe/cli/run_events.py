"""Events of a run's members, read from their files of JSON lines."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from evermoe.events import (
    Checkpoint,
    Commit,
    CorruptionFound,
    Damaged,
    Event,
    Joined,
    Measured,
    MemberLost,
    Recovered,
    SampleSkipped,
    SickNode,
    Skipped,
    SlowLoader,
    SlowMember,
)
from evermoe.observe.json_lines import read_line


@dataclass
class Member:
    """A process of the run, from its lines in a file."""

    source: str
    first: float
    """Time of its first event, in seconds since 1970."""
    last: float = 0.0
    joined: Joined | None = None
    """Its latest one."""
    commits: int = 0
    recoveries: int = 0
    measured: list[tuple[float, Measured]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Its name in the job, or the file and process ID of one that never joined."""
        return self.joined.member if self.joined else self.source


@dataclass
class RunEvents:
    """All members of a run, and its events in order of time, each once even if several members emit it."""

    members: list[Member]
    events: list[tuple[float, str, Event]]
    """Time, name of the member, event: the first of those that several members emit, of `Recovered` the longest."""


def read_run(sources: Sequence[str]) -> RunEvents:
    """Read files that `JsonLines` wrote, or all `*.jsonl` in folders.

    Raises:
        ValueError: there is no event in them.
        OSError: a file cannot be read.
    """
    members: dict[tuple[Path, int], Member] = {}
    found: dict[Hashable, tuple[float, str, Event]] = {}
    for path in dict.fromkeys(_files(sources)):
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                read = read_line(line)
                if read is None:
                    continue
                pid, at, event = read
                member = members.setdefault((path, pid), Member(f"{path.name}, process {pid}", at))
                _note(member, at, event)
                key = _key(member, event)
                if key is not None and (key not in found or _is_longer(event, found[key][2])):
                    found[key] = at, member.name, event
    if not members:
        raise ValueError(
            f"{', '.join(sources)}: expected events in files that evermoe.observe.JsonLines wrote, got none"
        )
    events = sorted(found.values(), key=lambda each: each[0])
    return RunEvents(sorted(members.values(), key=lambda each: (each.first, each.source)), events)


def _files(sources: Sequence[str]) -> Iterator[Path]:
    for source in map(Path, sources):
        yield from sorted(source.rglob("*.jsonl")) if source.is_dir() else [source]


def _note(member: Member, at: float, event: Event) -> None:
    member.last = max(member.last, at)
    if isinstance(event, Joined):
        member.joined = event
    elif isinstance(event, Commit):
        member.commits += 1
    elif isinstance(event, Recovered):
        member.recoveries += 1
    elif isinstance(event, Measured):
        member.measured.append((at, event))


def _key(member: Member, event: Event) -> Hashable:
    """Return what an event has in common with other members' events about the same; None if it is not shown."""
    generation = member.joined.generation if member.joined else 0
    about: Hashable = None
    match event:
        case Commit():
            about = event.step, event.generation
        case Recovered() | CorruptionFound() | Skipped():
            about = event.step, generation
        case MemberLost():
            about = event.key
        case Joined():
            about = event.member
        case Checkpoint():
            about = event.step, event.path
        case SlowMember():
            about = event.member, event.step
        case SlowLoader() | SampleSkipped() | SickNode() | Damaged():
            about = member.source, repr(event)
    return None if about is None else (type(event), about)


def _is_longer(event: Event, known: Event) -> bool:
    both = isinstance(event, Recovered) and isinstance(known, Recovered)
    return both and sum(event.seconds.values()) > sum(known.seconds.values())  # type: ignore[attr-defined]
