"""Colours of all figures."""

from __future__ import annotations

RED, BLUE, GREY = "#c0392b", "#2c6fbb", "#7f8c8d"
GREEN, PALE, ORANGE = "#27874f", "#cfe8d5", "#e08e2b"
