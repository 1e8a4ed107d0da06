"""Flags of `evermoe reproduce`. This module does not import torch."""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Compute the numbers of the five papers whose mechanisms evermoe implements, and compare them with the published ones:
how each was computed, by how much they differ, and why. Where a paper is wrong, a counter-example shows it.

  evermoe reproduce list
  evermoe reproduce gemini-f9 lazarus-theorem1
  evermoe reproduce all --slow --markdown docs/evidence.md"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `evermoe reproduce`."""
    parser.description = DESCRIPTION
    parser.add_argument(
        "names",
        nargs="*",
        default=["list"],
        metavar="ID",
        help="figures, such as gemini-f9; a paper: gemini, pec, lazarus, baft or moetion; all; or list, which is the "
        "default",
    )
    parser.add_argument(
        "--slow", action="store_true", help="with all, or a paper: include figures that train or measure (minutes)"
    )
    parser.add_argument("--json", metavar="PATH", help="write all numbers as JSON")
    parser.add_argument("--markdown", metavar="PATH", help="write a page of Markdown, with the command that wrote it")
