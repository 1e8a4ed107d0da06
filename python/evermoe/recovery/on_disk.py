"""Checkpoints and saves that count in a recovery."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from evermoe.checkpoint.checkpoint_store import find_manifests, verified_or_saves
from evermoe.checkpoint.manifest import Manifest
from evermoe.checkpoint.object_store import LOOK_SECONDS, Location, hurried
from evermoe.process.warn import warn
from evermoe.state.version import step_of


def find_usable(
    where: Location | None, layout: str, kinds: Collection[str], *, is_member: bool, only_verified: bool
) -> list[Manifest]:
    """Return the checkpoints and saves of a layout.

    Args:
        where: folder or URL; None for nowhere.
        layout: of the model.
        kinds: checkpoints, saves, or both.
        is_member: whether this process has state of the job. Then it ignores them while the store is away.
        only_verified: whether only verified checkpoints count.

    Raises:
        OSError: the store is away, and this process may depend on it.
    """
    if where is None:
        return []
    try:
        where = hurried(where, LOOK_SECONDS) if is_member else where
        found = find_manifests(where, layout, kinds)
        return verified_or_saves(found) if only_verified else found
    except OSError as error:
        if not is_member:
            raise
        warn(f"this recovery does without checkpoints: {error.strerror or error}")
        return []


def refuse_beginning(version: int, versions: Iterable[int]) -> None:
    """Refuse to begin a job again that only resumes from verified checkpoints, and has none.

    Raises:
        ValueError: some of it is of a later step than 0; the same on all members.
    """
    newest = max(map(step_of, versions), default=0)
    if newest and not step_of(version):
        raise ValueError(
            f"checkpoints: resume_from is 'verified', and no checkpoint is, but nodes have state of step {newest} in "
            "memory: resume from that with Checkpoints(resume_from='newest'), or begin a new job with another name"
        )
