"""State of training, as a session and a pipeline's session report it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from evermoe.comm.membership import MembershipManager
from evermoe.events import Recovered
from evermoe.optim.combined import as_one
from evermoe.session.protocol import CommitProtocol
from evermoe.session.training_driver import TrainingDriver


class BaseSession:
    """The part of `evermoe.Session` and `evermoe.PipelineSession` that reports the state of training."""

    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
    _driver: TrainingDriver
    _protocol: CommitProtocol
    _membership: MembershipManager

    @property
    def step(self) -> int:
        """Steps that the state has taken."""
        return self._protocol.step

    @property
    def version(self) -> int:
        """Version of the state: see `evermoe.state.version`."""
        return self._protocol.version

    @property
    def generation(self) -> int:
        """Number of the membership: it grows when members change."""
        return self._membership.generation

    @property
    def loss(self) -> float:
        """Mean loss of the latest step's global batch, the same on all members; NaN before the first step.

        In a `Session` also right after a resume.
        """
        return self._driver.results.loss

    @property
    def grad_norm(self) -> float:
        """Norm of the latest step's gradient over all parameters, before changes and clipping; NaN before a step."""
        return self._driver.results.grad_norm

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step, of the first optimizer's first group of parameters."""
        return float(as_one(self.optimizer).param_groups[0]["lr"])

    @property
    def skipped(self) -> int:
        """Steps whose update all members have left out, since this process began; see `on_nonfinite`."""
        return self._driver.skipped

    @property
    def reports(self) -> list[Recovered]:
        """Recoveries so far, as this member saw them."""
        return self._driver.history.reports

    def leave(self) -> None:
        """Leave the job after the step in progress: the loop of `steps` ends on this member.

        No step has to be repeated. The other members of a `Session` continue without this one; those of a
        `PipelineSession` wait until another process has its place. State without a copy on the others of a `Session` is
        written to a checkpoint first, if it has `checkpoints`. No-op in the last step. Any thread may call it, and a
        signal handler.
        """
        self._driver.lost.is_leaving = True
        self._protocol.leave()

    def write_trace(self, path: str | Path) -> None:
        """Write this member's latest profiled steps, its windows and its copies for Perfetto.

        `evermoe trace` merges the traces of several members.

        Raises:
            ValueError: no step was profiled yet.
        """
        self._driver.window_planner.write_trace(path)
