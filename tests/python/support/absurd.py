"""Calls the native planners with numbers of the right type that make no sense; run as a program of its own.

    python -m support.absurd SEED SECONDS

Each call is printed before it is made, so that the last line says what ended the process.
"""

from __future__ import annotations

import contextlib
import json
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from evermoe import _native

ROOM_BYTES = 2 << 30
"""Bytes that the calls may allocate: an allocation beyond it aborts the process."""
SIZES = (
    0,
    1,
    2,
    3,
    4,
    7,
    (1 << 24) + 1,
    1 << 31,
    1 << 32,
    1 << 35,
    1 << 53,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
)
SIGNED = (-(1 << 63), -1, 0, 1, 2, 3, 5, 1000, 1 << 31, 1 << 53, 1 << 62, (1 << 63) - 1)
REALS = (0.0, -0.0, 0.5, 1.0, 1.5, 3.0, -1.0, 1e-300, 5e-324, 1e-9, 1e9, 1e300, 1.7e308, float("inf"), float("nan"))
NAMES = ("", "a", "b", "a", "ä" * 40, "\x00")


class Draw:
    """Arguments from one seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def size(self) -> int:
        return self.random.choice(SIZES[:6] if self.random.random() < 0.7 else SIZES)

    def maybe(self, draw: Callable[[], Any]) -> Any:
        return draw() if self.random.random() < 0.5 else None

    def real(self) -> float:
        return self.random.choice(REALS)

    def name(self) -> str:
        return self.random.choice(NAMES)

    def word(self, *words: str) -> str:
        return self.random.choice((*words, "moon"))

    def flags(self, number: int) -> list[bool]:
        return [self.random.random() < 0.5 for _ in range(number)]

    def few(self, draw: Callable[[], Any], most: int = 5) -> list[Any]:
        return [draw() for _ in range(self.random.randrange(most))]

    def sizes(self) -> list[int]:
        return self.few(self.size)

    def size_lists(self) -> list[list[int]]:
        return self.few(self.sizes)

    def matrix(self) -> np.ndarray:
        shape = self.random.randrange(5), self.random.randrange(5)
        values = SIGNED if self.random.random() < 0.3 else SIGNED[2:7]
        return np.array([self.random.choice(values) for _ in range(shape[0] * shape[1])], np.int64).reshape(shape)

    def counts(self) -> np.ndarray:
        return np.array(self.few(lambda: self.random.choice(SIGNED), 8), np.int64)

    def loads(self) -> np.ndarray:
        return np.array(self.few(self.real, 8), np.float64)

    def span(self) -> tuple[Any, ...]:
        kind = self.word("compute", "send", "receive", "collective", "copy")
        resource_name = self.word("compute", "network", "host_link")
        return self.name(), kind, resource_name, self.real(), self.real(), self.size(), self.sizes()

    def steps(self) -> list[tuple[float, list[Any]]]:
        if self.random.random() < 0.7:
            return [(8.0, [("s", "send", "network", start, 1.0, self.size(), [1]) for start in (0.0, 4.0)])] * 2
        return self.few(lambda: (self.real(), self.few(self.span)))

    def windows(self) -> Any:
        return _native.find_windows(self.steps(), 0.0, 1.0, []) if self.random.random() < 0.5 else WINDOWS

    def plan(self) -> Any:
        if self.random.random() < 0.3:
            return PLAN
        link = (self.real(), self.real()) if self.random.random() < 0.5 else (1e-3, 1e3)
        memory = (self.size(), self.size(), self.maybe(lambda: (self.real(), self.real())))
        return _native.plan_chunks(
            self.few(lambda: (self.name(), self.size(), self.sizes())),
            self.windows(),
            self.few(lambda: (self.size(), self.windows(), self.real()), 3),
            link,
            memory,
            self.word("gemini", "baft", "moetion", "auto"),
            self.size(),
            self.maybe(self.size),
        )

    def damaged(self, text: str) -> str:
        """JSON with some numbers replaced."""

        def change(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: change(each) for key, each in value.items()}
            if isinstance(value, list):
                found = [change(each) for each in value]
                return found * self.random.choice((1, 1, 1, 3)) if self.random.random() < 0.1 else found
            if isinstance(value, bool) or value is None or isinstance(value, str) or self.random.random() < 0.8:
                return value
            return self.random.choice(SIZES + SIGNED + REALS)

        return json.dumps(change(json.loads(text)))


def _ledger(draw: Draw) -> Any:
    ledger = _native.TokenLedger(draw.size(), draw.size(), draw.size(), draw.real())
    ledger.add(draw.matrix())
    ledger.copied(draw.size_lists())
    ledger.lose(draw.size_lists())
    ledger.restore(draw.matrix(), draw.matrix(), draw.matrix(), draw.size())
    ledger.portions(draw.matrix())
    return _native.TokenLedger.from_json(draw.damaged(ledger.to_json())).plt


def _average(draw: Draw) -> Any:
    average = _native.LoadAverage(draw.size(), draw.size(), draw.real(), None)
    average.add(draw.matrix())
    return average.loads


def _log(draw: Draw) -> Any:
    log = _native.ReplayLog([("a", 4, 48), ("b", draw.size(), draw.size())], draw.size())
    act = draw.random.choice(["newest", "version", "needs_state", "installed", "forget"])
    log.take(draw.size(), draw.size(), draw.size())
    log.applied(draw.size(), draw.size(), draw.size(), draw.size())
    return getattr(log, act)(draw.size())


def _place(draw: Draw) -> Any:
    nodes, slots = draw.size(), draw.size()
    replicas = draw.counts()
    if draw.random.random() < 0.7 and nodes * slots in range(1, 64):
        load = np.array([draw.random.choice(REALS[:4]) for _ in range(draw.random.randrange(1, 6))])
        replicas = _native.allocate(load, nodes, slots, draw.size())
    policy = draw.word("mro", "spread", "compact", "safest", "balanced")
    load, previous = draw.maybe(draw.loads), draw.maybe(draw.matrix)
    return _native.place(
        replicas, nodes, slots, policy, load, previous, draw.maybe(draw.size_lists), draw.maybe(draw.size)
    )


def _copies(draw: Draw) -> Any:
    units = draw.few(lambda: (draw.size(), draw.size(), draw.sizes(), draw.real(), draw.random.random() < 0.5))
    nodes = draw.few(lambda: (draw.real(), draw.size(), draw.size(), draw.size(), draw.real(), draw.real()))
    links = [(draw.real(), draw.real()) for _ in range(2)]
    return _native.choose_copies(
        units, nodes, *links, draw.real(), draw.size(), draw.real(), draw.size(), draw.size(), draw.size()
    )


def _plan_protection(draw: Draw) -> Any:
    link = lambda: (draw.real(), draw.real())  # noqa: E731
    units = draw.few(
        lambda: (draw.size(), draw.size(), draw.few(lambda: draw.size() % 5, 4), draw.real(), *draw.flags(2))
    )
    ranks = draw.few(
        lambda: (
            draw.name(),
            draw.size(),
            *draw.flags(1),
            draw.maybe(draw.real),
            draw.maybe(draw.real),
            draw.size(),
            draw.maybe(link),
            draw.maybe(draw.real),
        )
    )
    preset = draw.word(*(row["name"] for row in _native.PRESETS))
    return _native.plan_protection(preset, units, ranks, draw.size(), draw.real())


def _select(draw: Draw) -> Any:
    tokens = draw.matrix()
    return _native.select_load_aware(np.abs(tokens), np.abs(tokens) % 9, tokens % 3 - 1, draw.size(), draw.size())


def _recovery(draw: Draw) -> Any:
    def holding() -> tuple[str, int, int, str]:
        return draw.name(), draw.size(), draw.size(), draw.word("active", "replayed", "snapshot", "persisted")

    units = draw.few(lambda: (draw.name(), draw.size()))
    holdings = draw.few(lambda: draw.few(holding))
    members = [(draw.random.random() < 0.5, draw.random.random() < 0.5) for _ in holdings]
    _native.usable_holdings(members, holdings)
    needs, may_lag = draw.few(lambda: draw.few(draw.name)), draw.few(draw.name)
    return _native.recovery_plan(units, holdings, needs, may_lag, draw.few(draw.size))


def _samples(draw: Draw) -> int | None:
    return draw.maybe(lambda: draw.random.choice((0, 1, 100, (1 << 32) + 1, (1 << 64) - 1)))


CALLS: dict[str, Callable[[Draw], Any]] = {
    "split_tokens": lambda draw: _native.split_tokens(
        draw.matrix(), draw.matrix(), draw.size(), draw.word("even", "balanced")
    ),
    "imbalance": lambda draw: _native.imbalance(draw.matrix(), draw.loads(), draw.word("even", "balanced")),
    "LoadAverage": _average,
    "allocate": lambda draw: _native.allocate(draw.loads(), draw.size(), draw.size(), draw.size()),
    "place": _place,
    "session_slots": lambda draw: _native.session_slots(draw.size(), draw.sizes(), draw.maybe(draw.size), draw.size()),
    "is_worth_moving": lambda draw: _native.is_worth_moving(draw.real(), draw.real()),
    "keep_in_place": lambda draw: _native.keep_in_place(draw.matrix(), draw.matrix(), draw.counts(), draw.size_lists()),
    "place_owners": lambda draw: _native.place_owners(draw.sizes(), draw.size_lists(), draw.size_lists(), draw.sizes()),
    "migrate": lambda draw: _native.migrate(draw.matrix(), draw.matrix(), draw.counts(), draw.maybe(draw.size_lists)),
    "copy_holders": lambda draw: _native.copy_holders(
        draw.few(draw.name), draw.size(), draw.word("mixed", "group", "ring", "previous")
    ),
    "training_copy_holders": lambda draw: _native.training_copy_holders(
        draw.few(draw.name), draw.sizes(), draw.sizes(), draw.size(), draw.size()
    ),
    "recovery_probability": lambda draw: _native.recovery_probability(
        draw.matrix(), draw.size(), draw.maybe(draw.size_lists), _samples(draw), draw.size()
    ),
    "copy_recovery_probability": lambda draw: _native.copy_recovery_probability(
        draw.size_lists(), draw.size(), draw.maybe(lambda: draw.few(draw.name)), _samples(draw), draw.size()
    ),
    "primaries": lambda draw: _native.primaries(draw.size_lists(), draw.sizes(), draw.size()),
    "unit_copy_holders": lambda draw: _native.unit_copy_holders(
        draw.sizes(), draw.size_lists(), draw.few(draw.name), draw.size()
    ),
    "choose_copies": _copies,
    "plan_protection": _plan_protection,
    "recovery_plan": _recovery,
    "select_sequential": lambda draw: _native.select_sequential(draw.size(), draw.size(), draw.size(), draw.size()),
    "select_load_aware": lambda draw: _native.select_load_aware(
        draw.matrix(), draw.maybe(draw.matrix), draw.maybe(draw.matrix), draw.size(), draw.size()
    ),
    "select_load_aware of ranks": _select,
    "select_by_budget": lambda draw: _native.select_by_budget(draw.matrix(), draw.size()),
    "shard_modules": lambda draw: _native.shard_modules(draw.sizes(), draw.sizes(), draw.size()),
    "find_windows": lambda draw: _native.find_windows(draw.steps(), draw.real(), draw.real(), draw.few(draw.name)),
    "has_changed": lambda draw: _native.has_changed(draw.windows(), draw.steps(), draw.real()),
    "plan_chunks": lambda draw: draw.plan().rows,
    "version_pace": lambda draw: _native.version_pace(
        (draw.size(), draw.real(), draw.real(), draw.size()),
        draw.real(),
        (draw.real(), draw.real()),
        draw.real(),
        draw.size(),
    ),
    "snapshot_memory": lambda draw: _native.snapshot_memory(draw.size(), draw.sizes(), draw.size()),
    "Windows.from_json": lambda draw: _native.Windows.from_json(draw.damaged(WINDOWS.to_json())).rows,
    "ChunkPlan.from_json": lambda draw: _native.chrome_trace(
        STEPS, WINDOWS, _native.ChunkPlan.from_json(draw.damaged(PLAN.to_json())), [], draw.size(), draw.real()
    ),
    "chrome_trace": lambda draw: _native.merge_traces(
        [
            _native.chrome_trace(
                draw.steps(),
                draw.maybe(draw.windows),
                draw.maybe(draw.plan),
                draw.few(lambda: (draw.real(), draw.real(), draw.size(), draw.size(), draw.maybe(draw.size))),
                draw.size(),
                draw.real(),
            )
        ]
    ),
    "TokenLedger": _ledger,
    "ReplayLog": _log,
}
STEPS = [(8.0, [("s", "send", "network", start, 1.0, 64, [1]) for start in (0.0, 4.0)])] * 2
WINDOWS = _native.find_windows(STEPS, 0.0, 1.0, [])
PLAN = _native.plan_chunks([("a", 50, [1]), ("b", 9, [1])], WINDOWS, [], (1.0, 10.0), (40, 2, None), "auto", 4, 1)


def main(seed: int, seconds: float) -> None:
    """Calls functions in turn until the time is over."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, resource.RLIM_INFINITY))
    end, number = time.monotonic() + seconds, seed << 32
    while time.monotonic() < end:
        for name, call in CALLS.items():
            number += 1
            print(f"{name} {number}", flush=True)
            began = time.monotonic()
            with contextlib.suppress(ValueError):
                call(Draw(number))
            if time.monotonic() - began > 2:
                raise AssertionError(f"{name} {number} took {time.monotonic() - began:.1f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
