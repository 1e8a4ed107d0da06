"""State of the members of a running job, from their Prometheus endpoints or from files of JSON lines."""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

from evermoe.observe.json_lines import read_line
from evermoe.observe.metrics import Metrics
from evermoe.options import checked
from evermoe.process.reports import EventFile

if TYPE_CHECKING:
    from prometheus_client import Metric

ANSWER_SECONDS = 3.0
"""Seconds within which a member has to answer."""
MAX_THREADS = 64
"""Largest number of threads that query members at a time."""
MAX_PORT = 65535
MAX_ENDPOINTS = 4096
_ENDPOINT = re.compile(r"(?:(?P<host>\[[^]]+\]|[^:\[\]/]*):)?(?P<first>\d+)(?:-(?P<last>\d+))?")


@dataclass(frozen=True)
class MemberView:
    """State that a member reports. Numbers that it does not report are None."""

    source: str
    """Its endpoint, or its process and file."""
    problem: str = ""
    """Reason why its current state is unknown; empty if it answers."""
    seconds_since_event: float | None = None
    """Seconds since the last line of a file."""
    job: str = ""
    member: str = ""
    node: str = ""
    rank: int | None = None
    role: str = ""
    generation: int | None = None
    state: str = ""
    """See `metrics.STATES`."""
    step: int | None = None
    """Steps that no failure which the preset covers can undo."""
    loss: float | None = None
    samples: int | None = None
    """Samples that the job has consumed; None if it does not say."""
    tokens: int | None = None
    """Tokens that the script has counted so far; None if it counts none."""
    epoch: float | None = None
    members: int | None = None
    step_seconds: float | None = None
    """Mean seconds of the latest steps."""
    data_fraction: float | None = None
    """Part of these steps in which the member waited for its batches."""
    own_seconds: float | None = None
    """Mean of the seconds of these steps in which the member did not wait for others; None if it does not say."""
    slow: str = ""
    """Part by which it is slower than the others, as `events.SlowMember.part`; empty if it is not."""
    tokens_per_second: float | None = None
    imbalance: float | None = None
    expert_imbalance: float | None = None
    plt_at_risk: float | None = None
    """Portion of the run's tokens that are in no copy of their experts; None if it is zero."""
    lag: dict[str, int] = field(default_factory=dict)
    """Steps behind training, by kind of copy."""
    copied_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of copies sent so far, by kind."""
    checkpoint_step: int | None = None
    recoveries: int | None = None
    recovery_reason: str = ""
    recovery_failure: str = ""
    """Kind of the last failure; `recovery_tier` is where units came from. See `events.Recovered`."""
    recovery_tier: str = ""
    recovery_began: float | None = None
    """Seconds since 1970."""
    recovery_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the last recovery, by phase."""
    survives_one: float | None = None
    survives_two: float | None = None
    is_covered: bool | None = None
    """Whether all copies of the plan are complete."""
    fatal: dict[str, int] = field(default_factory=dict)
    """Losses of nodes that the job would not survive now, and the units lost with each."""


def view_of(source: str, families: Iterable[Metric]) -> MemberView:
    """Return the view of a member from its metrics.

    Raises:
        ValueError: the metrics are not those of a member.
    """
    values: dict[str, float] = {}
    by_label: dict[str, dict[str, float]] = defaultdict(dict)
    labels: dict[str, Mapping[str, str]] = {}
    for sample in (sample for family in families for sample in family.samples):
        name = sample.name.removeprefix("evermoe_")
        if sample.value == 1 or not name.endswith(("_info", "state")):
            labels[name] = sample.labels
        if len(sample.labels) == 1:
            by_label[name][next(iter(sample.labels.values()))] = sample.value
        elif not sample.labels:
            values[name] = sample.value
    if "recoveries_total" not in values:
        raise ValueError("the endpoint has no metrics of evermoe")
    about, recovery = labels.get("member_info", {}), labels.get("last_recovery_info", {})
    states = by_label["state"]

    def number(name: str, begun: bool = True) -> float | None:
        return values.get(name) if begun else None

    def integer(text: float | str | None) -> int | None:
        return None if text in (None, "") else int(text)

    has_recovered, has_stepped = bool(values["recoveries_total"]), bool(values.get("step_seconds_count"))
    survives = by_label["survives_losses"]
    return MemberView(
        source,
        job=about.get("job", ""),
        member=about.get("member", ""),
        node=about.get("node", ""),
        rank=integer(about.get("rank")),
        role=about.get("role", ""),
        generation=integer(about.get("generation")),
        state=next((state for state, is_on in states.items() if is_on), ""),
        step=integer(number("step", has_recovered)),
        loss=number("loss", has_stepped),
        samples=integer(values.get("samples") or None),
        tokens=integer(values.get("counted_tokens") or None),
        epoch=None if math.isnan(values.get("epoch", math.nan)) else number("epoch", has_stepped),
        members=integer(number("members", has_recovered)),
        step_seconds=number("recent_step_seconds", has_stepped),
        data_fraction=number("recent_data_fraction", has_stepped),
        own_seconds=number("recent_own_seconds", bool(values.get("recent_own_seconds"))),
        slow=next((part for part, is_on in by_label["slow"].items() if is_on), ""),
        tokens_per_second=number("recent_tokens_per_second", bool(values.get("recent_tokens_per_second"))),
        imbalance=number("imbalance", bool(values.get("imbalance"))),
        expert_imbalance=number("expert_imbalance", bool(values.get("expert_imbalance"))),
        plt_at_risk=number("plt_at_risk", bool(values.get("plt_at_risk"))),
        lag={kind: int(steps) for kind, steps in by_label["copy_lag_steps"].items()},
        copied_bytes={kind: int(nbytes) for kind, nbytes in by_label["copied_bytes_total"].items()},
        checkpoint_step=integer(number("checkpoint_step", bool(values.get("checkpoint_step")))),
        recoveries=int(values["recoveries_total"]),
        recovery_reason=recovery.get("reason", ""),
        recovery_failure=recovery.get("failure", ""),
        recovery_tier=recovery.get("tier", ""),
        recovery_began=number("last_recovery_begin_seconds", has_recovered),
        recovery_seconds=dict(by_label["last_recovery_seconds"]),
        survives_one=survives.get("1"),
        survives_two=survives.get("2"),
        is_covered=bool(values["covered"]) if survives else None,
        fatal={nodes: int(units) for nodes, units in by_label["fatal_loss_units"].items()},
    )


def endpoints(text: str) -> list[str]:
    """Return addresses `host:port` of `PORT`, `HOST:PORT`, or consecutive ports `HOST:FIRST-LAST`.

    >>> endpoints("9400-9401"), endpoints("gpu1:9400")
    (['localhost:9400', 'localhost:9401'], ['gpu1:9400'])

    Raises:
        ValueError: the text has none of these forms.
    """
    found = _ENDPOINT.fullmatch(text)
    if found is None:
        raise ValueError(f"expected PORT, HOST:PORT, HOST:FIRST-LAST or a file of JSON lines, got {text!r}")
    first, host = int(found["first"]), found["host"] or "localhost"
    last = int(found["last"] or first)
    for port in (first, last):
        checked(f"port of {text!r}", port, int, least=1, most=MAX_PORT)
    if not first <= last < first + MAX_ENDPOINTS:
        raise ValueError(f"expected the first port, then the last, of at most {MAX_ENDPOINTS}, got {text!r}")
    return [f"{host}:{port}" for port in range(first, last + 1)]


def fetch(address: str) -> MemberView:
    """Return the member whose metrics are served at `host:port`; one that does not answer has a `problem`."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        with urlopen(f"http://{address}/metrics", timeout=ANSWER_SECONDS) as answer:
            return view_of(address, text_string_to_metric_families(answer.read().decode()))
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        return MemberView(address, problem=str(getattr(reason, "strerror", None) or reason) or type(reason).__name__)


class Members:
    """Reads the state of all members of a job repeatedly.

    Args:
        sources: endpoints as `endpoints` takes them, and files that `JsonLines` writes.

    Raises:
        ValueError: a source is neither.
    """

    def __init__(self, sources: Sequence[str]) -> None:
        files = [source for source in sources if Path(source).is_file()]
        self._addresses = [each for source in sources if source not in files for each in endpoints(source)]
        self._files = [_Processes(Path(source)) for source in files]
        self._known: dict[str, MemberView] = {}
        """Latest view of each member that has answered."""

    def look(self) -> list[MemberView]:
        """Return all members now, by rank; those that do not answer come last, with their latest state."""
        views = [view for file in self._files for view in file.read()]
        if self._addresses:
            with ThreadPoolExecutor(min(MAX_THREADS, len(self._addresses))) as pool:
                views += map(self._remember, pool.map(fetch, self._addresses))
        return sorted(views, key=lambda view: (bool(view.problem), view.rank is None, view.rank or 0, view.source))

    def _remember(self, view: MemberView) -> MemberView:
        """Return the known identity of a member that does not answer."""
        if not view.problem:
            self._known[view.source] = view
        known = self._known.get(view.source, view)
        return replace(view, job=known.job, member=known.member, node=known.node, role=known.role)


class _Processes:
    """Processes that write events to a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._file = EventFile(path)
        self._metrics: dict[int, Metrics] = {}
        """Metrics from the lines of each process, by its ID."""
        self._times: dict[int, float] = {}

    def read(self) -> list[MemberView]:
        """Return its processes; those of an earlier generation have a `problem`."""
        for line in self._file.read_lines():
            found = read_line(line.decode(errors="replace"))
            if found is not None:
                pid, at, event = found
                self._metrics.setdefault(pid, Metrics())(event)
                self._times[pid] = at
        views = [
            replace(
                view_of(f"{self._file.path}, process {pid}", metrics.registry.collect()),
                seconds_since_event=max(0.0, time.time() - self._times[pid]),
            )
            for pid, metrics in self._metrics.items()
        ]
        newest = max((view.generation or 0 for view in views), default=0)
        return [
            replace(view, problem=f"no member since generation {view.generation + 1}")
            if view.generation and view.generation < newest and view.state != "agree"
            else view
            for view in views
        ]
