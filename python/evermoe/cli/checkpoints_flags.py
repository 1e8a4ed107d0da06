"""The flags of `evermoe checkpoints`; they import no torch."""

from __future__ import annotations

import argparse

from evermoe.cli import export

_PLACE = "checkpoint_dir of a session: a folder, s3://BUCKET/PATH, gs://…, az://…, or https://… for reading"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions and their flags."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    every = actions.add_parser("list", help="the complete checkpoints, older ones first")
    show = actions.add_parser("show", help="the units of a checkpoint: their files, tensors and digests")
    verify = actions.add_parser("verify", help="read checkpoints completely, and compare all bytes with their digests")
    copies = actions.add_parser("copy", help="copy checkpoints to another folder or URL, verified")
    prune = actions.add_parser("prune", help="remove the checkpoints that need not stay")
    for each in (every, show):
        each.add_argument("--json", action="store_true", help="print JSON")
    every.add_argument("folder", metavar="PLACE", help=_PLACE)
    show.add_argument("checkpoint", metavar="CHECKPOINT", help="what is called step-… there")
    verify.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint_dir, or checkpoints step-… of one")
    copies.add_argument("paths", nargs="+", metavar="PATH", help="a checkpoint_dir, or checkpoints step-… of one")
    copies.add_argument("to", metavar="PLACE", help="where they should be, too")
    prune.add_argument("folder", metavar="PLACE", help="checkpoint_dir of a session that does not run")
    prune.add_argument("--keep", type=int, default=2, metavar="N", help="newest ones that stay (%(default)s)")
    prune.add_argument(
        "--every", type=int, default=0, metavar="STEPS", help="multiples of this number of steps stay, too"
    )
    prune.add_argument("--dry-run", action="store_true", help="say what would go, and remove nothing")
    prune.add_argument(
        "--abandoned", action="store_true", help="at a URL: give up what a job that died has begun to write"
    )
    export.add_arguments(actions.add_parser("export", help="as `evermoe export`: for transformers or torch's DCP"))
