"""Listeners of a session's events: a file of JSON lines, metrics for Prometheus, curves for TensorBoard.

session = evermoe.Session(..., on_event=[JsonLines("events.jsonl"), Metrics(port=9400), TensorBoard("curves")])
"""

from evermoe.observe.json_lines import JsonLines
from evermoe.observe.metrics import Metrics
from evermoe.observe.tensorboard import TensorBoard

__all__ = ["JsonLines", "Metrics", "TensorBoard"]
