"""Flags of `evermoe measure`. This module does not import torch."""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Measure, within two minutes, the cost of failures on this machine: messages between two processes, copies, digests, the
disk, a short session of three workers of which one is killed, and sessions that save after every step or never. The
result is a file for evermoe simulate --constants."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `evermoe measure`."""
    parser.description = DESCRIPTION
    parser.add_argument("--out", metavar="FILE", default="evermoe-constants.json", help="file to write (%(default)s)")
    parser.add_argument(
        "--folder", metavar="DIR", default=".", help="folder on the disk that holds checkpoints (%(default)s)"
    )
    parser.add_argument("--memory-dir", default="/dev/shm", help="where shared memory lives (%(default)s)")
    parser.add_argument(
        "--no-session", action="store_true", help="skip the sessions, and keep the assumed constants for them"
    )
