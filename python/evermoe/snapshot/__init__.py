"""Snapshots: states that are captured in the background and sent to other nodes in idle windows."""

from evermoe.snapshot.chunked_copy import ChunkedCopy

__all__ = ["ChunkedCopy"]
