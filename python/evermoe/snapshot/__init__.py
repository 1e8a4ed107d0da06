"""Snapshots: states as they are captured, beside training, and sent to other nodes in idle windows."""

from evermoe.snapshot.chunked_copy import ChunkedCopy

__all__ = ["ChunkedCopy"]
