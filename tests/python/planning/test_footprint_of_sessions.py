"""The planner's memory against what the workers of a session hold, where a part of the model is frozen."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

from evermoe.planning.footprint import footprint
from evermoe.planning.models import ModelShape
from evermoe.planning.seating import FootprintOptions
from support.held_bytes import measure

CASES = [
    ("adapters", {"preset": "auto"}),
    ("frozen experts", {"preset": "gemini"}),
    ("frozen layer of experts", {"preset": "auto", "shard_optimizer": True}),
    ("frozen but experts", {"preset": "auto"}),
    ("frozen embedding", {"preset": "baft", "shard_optimizer": True}),
    ("adapters", {"preset": "gemini", "shard_optimizer": True}),
]
PARTS = ("parameters", "moments", "gradients", "replicas", "snapshots")


@pytest.mark.few(3)
@pytest.mark.parametrize(("kind", "options"), CASES)
def test_parts_of_the_formula_are_the_bytes_that_workers_hold(start, kind, options):
    found, logs = start(measure, "abc", kind, expert_slots=3, **options)
    rows = {name: {event["event"]: event for event in found[name]} for name in "abc"}
    assert all("held" in row for row in rows.values()), {name: log[-2000:] for name, log in logs.items()}
    shape = ModelShape(**{key: value for key, value in rows["a"]["shape"].items() if key not in ("event", "time")})
    adapted = shape.expert_parameters if kind == "adapters" else 0
    assert shape.adapted_expert_parameters == pytest.approx(adapted, abs=64), "all matrices; rows are padded"
    planned = footprint(shape, FootprintOptions(workers=3, weights="float32", expert_slots=3, **options))
    (uses,) = (moment.uses for moment in planned.moments if moment.phase == "step")
    for part in PARTS:
        expected, held = [getattr(use, part) for use in uses], [row["held"][part] for row in rows.values()]
        assert sum(held) == pytest.approx(sum(expected), rel=0.1), part
        assert max(held) == pytest.approx(max(expected), rel=0.1), part
