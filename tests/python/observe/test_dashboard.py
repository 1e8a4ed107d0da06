"""The dashboard for Grafana and the alerting rules of the docs query the metrics that members serve."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from evermoe.events import CoverageChanged, Measured, Recovered
from evermoe.observe import Metrics
from evermoe.observe.metrics import METRICS

FOLDER = Path(__file__).parents[3] / "docs" / "operations"
BOARD = json.loads((FOLDER / "grafana.json").read_text(encoding="utf-8"))
SUFFIXES = {"Counter": ["_total"], "Gauge": [""], "Histogram": ["_bucket", "_count", "_sum"], "Info": ["_info"]}
SERVED = {f"evermoe_{each.name}{suffix}": each for each in METRICS for suffix in SUFFIXES[each.kind]}
"""Metrics by the names of their samples, without `evermoe_state`."""
OF_PROMETHEUS = {"instance", "le"}
"""Labels that every sample, or every bucket, has."""


def queries(panel):
    return [(each["expr"], each["legendFormat"]) for each in panel.get("targets", ())]


def named(text):
    """Return the metrics that a query names."""
    return set(re.findall(r"\bevermoe_\w+", re.sub(r"by \([^)]*\)", "", text)))


def test_names_of_samples_are_those_that_a_member_serves():
    registry = CollectorRegistry()
    listener = Metrics(registry=registry)
    listener(Recovered(0.0, {"agree": 1.0}, 7, 0, 3, "lost", 1, 1, {}, 9, 0, []))
    listener(Measured(7, 0.5, 8, 1.5, 2.0, {"snapshot": 2}, {"snapshot": 30}))
    listener(CoverageChanged(1.0, 0.5, {"a + b": 2}, is_complete=True))
    served = set(re.findall(r"^(evermoe_\w+)", generate_latest(registry).decode(), re.M))
    served = {name for name in served if not name.endswith("_created")} - {"evermoe_state"}
    by_label = {name for name, metric in SERVED.items() if metric.labels or metric.kind == "Info"}
    assert set(SERVED) - by_label <= served <= set(SERVED)


@pytest.mark.parametrize("panel", BOARD["panels"], ids=lambda panel: panel["title"])
def test_panels_query_metrics_with_their_labels(panel):
    assert panel["type"] == "row" or queries(panel)
    for query, legend in queries(panel):
        names = named(query) - {"evermoe_state"}
        assert names <= set(SERVED), query
        labels = {label for name in names for label in SERVED[name].labels} | OF_PROMETHEUS | {"evermoe_state"}
        used = {label for group in re.findall(r"by \(([^)]*)\)", query) for label in re.split(r", ", group)}
        assert used | set(re.findall(r"{{(\w+)}}", legend)) <= labels, query
        assert query.count("(") == query.count(")")


def test_every_metric_is_on_the_dashboard():
    shown = set().union(*(named(query) for panel in BOARD["panels"] for query, _ in queries(panel)))
    missing = {each.name for each in METRICS if not any(SERVED.get(name) is each for name in shown)}
    assert not missing
    assert "evermoe_state" in shown


def test_panels_do_not_overlap():
    cells = set()
    for panel in BOARD["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        own = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not own & cells, panel["title"]
        cells |= own
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


def test_alerting_rules_query_metrics_that_exist():
    rules = re.findall(r"^ +expr: (.*)$", (FOLDER / "observe.md").read_text(encoding="utf-8"), re.M)
    assert len(rules) >= 5
    assert set().union(*map(named, rules)) <= set(SERVED)
