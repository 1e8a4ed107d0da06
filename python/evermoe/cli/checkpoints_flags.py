"""Flags of `evermoe checkpoints`. This module does not import torch."""

from __future__ import annotations

import argparse

from evermoe.cli import export

_PLACE = "where a session writes checkpoints: a folder, s3://BUCKET/PATH, gs://…, az://…, or https://… for reading"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their flags."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    every = actions.add_parser("list", help="list the complete checkpoints, the oldest first")
    show = actions.add_parser("show", help="show the units of a checkpoint: their files, tensors and digests")
    verify = actions.add_parser("verify", help="read checkpoints completely and compare all bytes with their digests")
    copies = actions.add_parser("copy", help="copy checkpoints to another folder or URL, and verify the copies")
    prune = actions.add_parser("prune", help="remove checkpoints that the retention flags do not keep")
    for each in (every, show):
        each.add_argument("--json", action="store_true", help="print JSON")
    every.add_argument("folder", metavar="PLACE", help=_PLACE)
    show.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint step-… of a session")
    verify.add_argument("paths", nargs="+", metavar="PATH", help="a folder of checkpoints, or single ones, step-…")
    copies.add_argument("paths", nargs="+", metavar="PATH", help="a folder of checkpoints, or single ones, step-…")
    copies.add_argument("to", metavar="PLACE", help="folder or URL to copy them to")
    prune.add_argument("folder", metavar="PLACE", help="folder of checkpoints of a session that is not running")
    prune.add_argument(
        "--keep", type=int, default=2, metavar="N", help="number of newest checkpoints to keep (%(default)s)"
    )
    prune.add_argument(
        "--every",
        type=int,
        default=0,
        metavar="STEPS",
        help="also keep checkpoints of steps that are multiples of this number",
    )
    prune.add_argument("--dry-run", action="store_true", help="print what would be removed, and remove nothing")
    prune.add_argument(
        "--abandoned", action="store_true", help="at a URL: abort uploads that a dead job has left incomplete"
    )
    export.add_arguments(
        actions.add_parser(
            "export", help="the same as `evermoe export`: convert to the format of transformers or of torch's DCP"
        )
    )
