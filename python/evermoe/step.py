"""One attempt at a step, as the training loop sees it."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from torch import Tensor

from evermoe.errors import PeerLost

if TYPE_CHECKING:
    from evermoe.session import Session


class Step:
    """One attempt at a step. Inside `with step:` compute the loss of `step.indices` and call `step.backward(loss)`.

    Leaving the block reduces, votes, updates, copies and commits. When a peer is lost on the way the block ends early
    without an exception, and the session's next step is the same one again.
    """

    def __init__(self, session: Session) -> None:
        share = session.sampler.share(session.group.rank, session.group.size)
        self.number = session.step
        """Steps committed before this one."""
        self.indices = share.indices
        """int64: the samples of this member."""
        self.weight = share.weight
        """This member's share of the global batch."""
        self.committed = False
        """Whether all members have agreed on the step and taken it."""
        self._session = session
        self._loss: Tensor | None = None
        self._entered = False

    def backward(self, loss: Tensor) -> None:
        """Backpropagates `loss`, the mean over `indices`, weighted by this member's share of the global batch."""
        if loss.numel() != 1:
            raise ValueError(f"step.backward: expected a scalar loss, got shape {tuple(loss.shape)}")
        scaled = loss * self.weight
        self._loss = scaled.detach() if self._loss is None else self._loss + scaled.detach()
        scaled.backward()

    def __enter__(self) -> Step:
        self._entered = True
        self._session._begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        if kind is None:
            try:
                if self._loss is None:
                    raise RuntimeError("step.backward(loss) was not called inside `with step:`")
                self.committed = self._session._commit(self)
            except BaseException as failure:
                self._session._fail(failure)
                raise
            return False
        if issubclass(kind, PeerLost):
            return True  # the group is dropped already; the session recovers before the next step
        self._session._fail(error)
        return False
