"""A change of role that an operator asks for: a replica node is promoted to train, or a worker demoted to keep copies.

    /dev/shm/evermoe-1000-JOB/PID.role      written by `evermoe role`: the role that the process is to have
    /dev/shm/evermoe-1000-JOB/PID.answer    written by the process: empty if it takes the role, else the reason

The member leaves its job after the step, which repeats no step. Its process then runs its program again in the other
role. So the protocol has no change of roles: a member leaves, and another one joins.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from weakref import WeakMethod

from evermoe.config.membership import Role
from evermoe.process.memory_folder import replace_text, role_files

logger = logging.getLogger(__name__)


class RoleRequest:
    """Looks for a request in each step, and runs the process's program again once its member has left for one.

    Args:
        folder: of the job on this machine.
        role: of this member.
        turn: prepares the change, and returns why it is impossible; empty if it is possible.
        leave: asks to leave after the step.
    """

    def __init__(self, folder: Path, role: Role, turn: Callable[[], str], leave: Callable[[], None]) -> None:
        self._role, self._turn = role, turn
        self._leave = WeakMethod(leave)  # the optimizer refers to this object, which must not keep a session alive
        self._request, self._answer = role_files(folder, os.getpid())
        self._request.unlink(missing_ok=True)  # of an earlier process with this number
        self._next: Role | None = None

    def look(self) -> None:
        """Follow a request, if there is one: the member leaves after the current step."""
        if self._next is not None or not self._request.exists():
            return
        wanted: Role = "train" if self._request.read_text() == "train" else "replica"
        problem = f"it has the role {wanted!r} already" if wanted == self._role else self._turn()
        replace_text(self._answer, problem)
        self._request.unlink(missing_ok=True)
        if problem:
            logger.warning("this process keeps its role: %s", problem)
            return
        self._next = wanted
        logger.warning("this process leaves its job after the step, and comes back with role %r", wanted)
        leave = self._leave()
        if leave is not None:
            leave()

    def obey(self) -> None:
        """Run the program again in its new role, if this member has left its job for one."""
        if self._next is not None:
            _begin_again(self._next)


def _begin_again(role: Role) -> NoReturn:
    os.environ["EVERMOE_ROLE"] = role
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
