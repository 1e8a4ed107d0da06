"""One attempt at a step, as the training loop sees it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from torch import Tensor

from evermoe.errors import PeerLost
from evermoe.sampler import Share


class Watcher(Protocol):
    """What is told of a step while the script computes it."""

    def begin_step(self, step: Step) -> None:
        """The script begins to compute."""

    def check_loss(self, loss: Tensor) -> None:
        """The script backpropagates a loss. May raise what is wrong with it."""


class Step:
    """One attempt at a step. Inside `with step:` compute the loss of `step.indices` and call `step.backward(loss)`.

    Leaving the block reduces, votes, updates, copies and commits. When a peer is lost on the way the block ends early
    without an exception, and the session's next step is the same one again.

    Args:
        number: steps committed before this one.
        share: this member's part of the global batch.
        watcher: is told that the block is entered, and of the first loss.
        commit: called as it is left; whether the step was taken.
        fail: called with what else ends it.
    """

    def __init__(
        self,
        number: int,
        share: Share,
        watcher: Watcher,
        commit: Callable[[Step], bool],
        fail: Callable[[BaseException | None], None],
    ) -> None:
        self.number = number
        """Steps committed before this one."""
        self.indices = share.indices
        """int64: the samples of this member."""
        self.weight = share.weight
        """This member's share of the global batch."""
        self.committed = False
        """Whether all members have agreed on the step and taken it."""
        self.loss: Tensor | None = None
        """This member's part of the global batch's mean loss; None before `backward`."""
        self.is_entered = False
        """Whether it was used as `with step:`."""
        self._watcher, self._commit, self._fail = watcher, commit, fail

    def backward(self, loss: Tensor) -> None:
        """Backpropagates `loss`, the mean over `indices`, weighted by this member's share of the global batch.

        Raises:
            ValueError: it is no tensor of one number that depends on parameters.
            UnsupportedState: it is scaled by `torch.amp.GradScaler`.
        """
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            found = type(loss).__name__
            if isinstance(loss, Tensor):
                found = f"a tensor of shape {list(loss.shape)}" + ("" if loss.requires_grad else " without a gradient")
            raise ValueError(f"step.backward: expected the loss, a tensor of one number with a gradient, got {found}")
        self._watcher.check_loss(loss)
        scaled = loss * self.weight
        self.loss = scaled.detach() if self.loss is None else self.loss + scaled.detach()
        scaled.backward()

    def __enter__(self) -> Step:
        self.is_entered = True
        self._watcher.begin_step(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if kind is None:
            try:
                if self.loss is None:
                    raise RuntimeError("step.backward(loss) was not called inside `with step:`")
                self.committed = self._commit(self)
            except BaseException as failure:
                self._fail(failure)
                raise
            return False
        if issubclass(kind, PeerLost):
            return True  # the group is dropped already; the session recovers before the next step
        self._fail(error)
        return False
