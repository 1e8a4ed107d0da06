"""One attempt at a step, as the training loop sees it."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from torch import Tensor

from evermoe.errors import PeerLost
from evermoe.sampler import Share


class Step:
    """One attempt at a step. Inside `with step:` compute the loss of `step.indices` and call `step.backward(loss)`.

    Leaving the block reduces, votes, updates, copies and commits. When a peer is lost on the way the block ends early
    without an exception, and the session's next step is the same one again.

    Args:
        number: steps committed before this one.
        share: this member's part of the global batch.
        begin: called as the block is entered.
        commit: called as it is left; whether the step was taken.
        fail: called with what else ends it.
    """

    def __init__(
        self,
        number: int,
        share: Share,
        begin: Callable[[Step], None],
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
        self._begin, self._commit, self._fail = begin, commit, fail

    def backward(self, loss: Tensor) -> None:
        """Backpropagates `loss`, the mean over `indices`, weighted by this member's share of the global batch."""
        if loss.numel() != 1:
            raise ValueError(f"step.backward: expected a scalar loss, got shape {tuple(loss.shape)}")
        scaled = loss * self.weight
        self.loss = scaled.detach() if self.loss is None else self.loss + scaled.detach()
        scaled.backward()

    def __enter__(self) -> Step:
        self.is_entered = True
        self._begin(self)
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
