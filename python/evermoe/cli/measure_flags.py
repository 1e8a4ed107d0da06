"""The flags of `evermoe measure`; they import no torch."""

from __future__ import annotations

import argparse

DESCRIPTION = """\
Measure, within two minutes, what failures cost on this machine: messages between two processes, copies, digests and
disk, a short real session of three workers of which one is killed, and some that save after every step or never.
evermoe simulate --constants reads the file."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `evermoe measure`."""
    parser.description = DESCRIPTION
    parser.add_argument("--out", metavar="FILE", default="evermoe-constants.json", help="what to write (%(default)s)")
    parser.add_argument("--folder", metavar="DIR", default=".", help="on the disk of checkpoints (%(default)s)")
    parser.add_argument("--memory-dir", default="/dev/shm", help="where shared memory lives (%(default)s)")
    parser.add_argument(
        "--no-session", action="store_true", help="leave the sessions out: keep what is assumed of them"
    )
