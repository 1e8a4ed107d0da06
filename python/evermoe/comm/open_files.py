"""File descriptors that a member needs. If gloo gets none for a connection in a pipeline, it aborts the process."""

from __future__ import annotations

import resource
from pathlib import Path

from evermoe.errors import TooFewFiles
from evermoe.options import count

MIN_FILES = 64
"""Descriptors of a job with one member, in addition to those that are open: ports, torchft, recoveries."""
FILES_PER_MEMBER = 20
"""Descriptors for each other member: connections of collectives, of copies, and to its ports."""


def reserve_open_files(members: int) -> None:
    """Ensure that this process may open the files and connections that a group needs.

    A soft limit that is too low is raised, as far as the hard limit allows.

    Args:
        members: number of members of the group, including this one.

    Raises:
        TooFewFiles: the hard limit is too low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_open = len(list(Path("/proc/self/fd").iterdir()))
    needed = is_open + MIN_FILES + FILES_PER_MEMBER * (members - 1)
    if needed <= soft or soft == resource.RLIM_INFINITY:
        return
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise TooFewFiles(
            f"this process may open {hard} files, and a job of {count(members, 'member')} needs {needed}: {is_open} "
            f"are open, and {MIN_FILES} are needed for a member and {FILES_PER_MEMBER} for each other one. Raise the "
            "limit (ulimit -Hn, LimitNOFILE of systemd, --ulimit nofile of docker)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
