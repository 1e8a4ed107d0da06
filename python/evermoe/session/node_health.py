"""Health of this member's hardware: a self-test before it joins its job, and a watch while it trains.

    before the first request   self-test, and the GPU's own state: a faulty member does not join
    while it trains            a thread waits for the GPU's Xid errors, and looks at its state from time to time
                               another one looks for free memory, and room for checkpoints: a problem is a warning
    a fault                    the member leaves after its step, as on SIGTERM, and its hardware is quarantined

No step waits for the threads. The first one sleeps in NVML, without the GIL; the second may hang with a file system.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import torch

from evermoe.comm.membership import MembershipManager
from evermoe.config.membership import OnSick
from evermoe.errors import UnfitNode
from evermoe.events import SickNode
from evermoe.events.base_event import Listener
from evermoe.session.gpu_health import Gpu, Problem
from evermoe.session.host_watch import find_host_problems
from evermoe.session.self_test import find_fault

logger = logging.getLogger(__name__)

LOOK_SECONDS = 10.0
"""Time between two looks at the state of a GPU, and of the host: neither reports all that is looked for."""
WAIT_SECONDS = 0.5
"""Longest wait for an event of a GPU: no other thread can end NVML's wait."""


class NodeHealth:
    """Watches the hardware of a member.

    Args:
        membership: knows this member.
        policy: action where hardware is faulty.
        device: computes its steps.
        emit: listener of the session.
    """

    def __init__(self, membership: MembershipManager, policy: OnSick, device: torch.device, emit: Listener) -> None:
        self._membership, self._policy, self._device, self._emit = membership, policy, device, emit
        self.fault = ""
        """The fault because of which this member must leave; empty without one."""
        self._is_over, self._has_begun = threading.Event(), False
        self._known: set[str] = set()
        """Problems that were reported."""
        self._checkpoints: tuple[Path | None, int] = None, 0

    @property
    def must_leave(self) -> bool:
        """Whether this member must leave. The last one that trains stays: nobody could continue."""
        return bool(self.fault) and self._membership.num_trainers > 1

    def watch_checkpoints(self, folder: Path | None, nbytes: int) -> None:
        """Warn if there is no room for a checkpoint: on the first member, as the folder is shared."""
        self._checkpoints = folder, nbytes

    def begin(self) -> None:
        """Test this member's hardware and begin the watch, before the member first asks to join.

        Raises:
            UnfitNode: the hardware is faulty.
        """
        if self.fault and not self._membership.established:  # found while it waits, as a spare
            self._refuse(self.fault)
        if self._has_begun or self._policy == "ignore":
            return
        self._has_begun = True
        if fault := find_fault(self._device):
            self._refuse(fault)
        threading.Thread(target=self._watch_host, name="evermoe-host", daemon=True).start()
        at = self._membership
        if at.messages.hardware == at.node:
            return
        try:
            gpu = Gpu(at.messages.hardware)
        except LookupError as error:
            logger.info("the health of this member's GPU is not watched: %s", error)
            return
        for problem in gpu.problems():
            if problem.is_fault:
                self._refuse(problem.text)
            self._report(problem)
        threading.Thread(target=self._watch, args=(gpu,), name="evermoe-health", daemon=True).start()

    def _refuse(self, fault: str) -> None:
        """Report a fault that was found before this member joins.

        Raises:
            UnfitNode: unless the policy is `warn`.
        """
        hardware = self._membership.messages.hardware
        if self._policy == "warn":
            self._report(Problem(fault, True))
            return
        raise UnfitNode(
            f"this process does not join its job, as {hardware} of {self._membership.node} is faulty: {fault}. Reset, "
            "repair or replace it; with on_sick='warn' the process would join nevertheless",
            hardware,
        )

    def close(self) -> None:
        """End the watch."""
        self._is_over.set()

    def _watch(self, gpu: Gpu) -> None:
        look_at = time.monotonic() + LOOK_SECONDS
        while not self._is_over.is_set():
            if gpu.has_events:
                self._report(gpu.wait(WAIT_SECONDS))
            else:
                self._is_over.wait(max(0.0, look_at - time.monotonic()))
            if time.monotonic() >= look_at:
                look_at = time.monotonic() + LOOK_SECONDS
                for problem in gpu.problems():
                    self._report(problem)
        gpu.close()

    def _watch_host(self) -> None:
        while not self._is_over.wait(LOOK_SECONDS):
            folder, nbytes = self._checkpoints
            for problem in find_host_problems(folder if self._membership.everyone.rank == 0 else None, nbytes):
                self._report(problem)

    def _report(self, problem: Problem | None) -> None:
        """Report a problem once; ask to leave if it is a fault."""
        if problem is None or problem.text in self._known:
            return
        self._known.add(problem.text)
        at = self._membership
        leaves = problem.is_fault and self._policy == "evict" and at.role == "train"
        logger.warning(
            "%s of %s: %s%s",
            at.messages.hardware,
            at.node,
            problem.text,
            ". This member leaves the job after the step, if others train (on_sick)" if leaves else "",
        )
        self._emit(SickNode(at.id, at.node, at.messages.hardware, problem.text, "evict" if leaves else "warn"))
        if leaves:
            self.fault = problem.text
