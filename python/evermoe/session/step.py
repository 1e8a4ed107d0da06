"""One attempt at a step, as the training loop sees it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Protocol

from torch import Tensor

from evermoe.data.sampler import Share
from evermoe.errors import PeerLost
from evermoe.options import checked


class Watcher(Protocol):
    """Notifications of a step while the script computes it."""

    def begin_step(self, step: Step) -> None:
        """Called when the script begins to compute."""

    def end_step(self) -> None:
        """Called when the block of the step has ended, also by an error."""

    def begin_part(self, weight: float) -> None:
        """Called when a part of this member's share begins, with its share of the global batch."""

    def check_loss(self, loss: Tensor) -> float:
        """Return the factor of a loss that is about to be backpropagated. May raise an error of the loss."""

    def end_backward(self) -> None:
        """Called when the loss is backpropagated."""


class Step:
    """One attempt at a step. Inside `with step as batch:` compute the loss of the batch and call `step.backward(loss)`.

    Entering yields this member's part of the global batch: that of an `ElasticLoader`, or with an `ElasticSampler` the
    indices of its samples. Leaving reduces, votes, updates, copies and commits. When a peer is lost inside the block,
    the block ends early without an exception, and the session's next step is the same one again.

    Args:
        number: steps committed before this one.
        generation: of the members among which the global batch is divided.
        share: returns this member's part of the global batch; called when the step needs it first.
        watcher: notified when the block is entered, and of each loss.
        commit: called as it is left; whether the step was taken.
        fail: called with what else ends it.
        lose: called with the reason where a `PeerLost` ends it.
    """

    def __init__(
        self,
        number: int,
        generation: int,
        share: Callable[[], Share],
        watcher: Watcher,
        commit: Callable[[Step], bool],
        fail: Callable[[BaseException | None], None],
        lose: Callable[[str], None],
    ) -> None:
        self.number = number
        """Steps committed before this one."""
        self.generation = generation
        """Of the members among which the global batch is divided. After a recovery this attempt cannot be taken."""
        self.committed = False
        """Whether all members have agreed on the step and taken it."""
        self.loss: Tensor | None = None
        """This member's part of the global batch's mean loss, or of its sum; None before `backward`."""
        self.count: float | Tensor | None = None
        """Count of this member; None for losses that are means."""
        self.is_entered = False
        """Whether it was used as `with step:`."""
        self._take_share = share
        self._part: Share | None = None
        """The current part of the share; None: all of it."""
        self._watcher, self._commit, self._fail, self._lose = watcher, commit, fail, lose

    @functools.cached_property
    def share(self) -> Share:
        """This member's part of the global batch."""
        return self._take_share()

    @property
    def indices(self) -> Tensor:
        """Numbers of this member's samples, int64."""
        return self.share.indices

    @property
    def weight(self) -> float:
        """This member's share of the global batch, in [0, 1]; inside `micro_batches`, that of the current part."""
        return (self._part or self.share).weight

    def micro_batches(self, n: int) -> Iterator[Any]:
        """Yield this member's batch in n parts, to accumulate their gradients with less memory.

            with step:
                for part in step.micro_batches(4):
                    step.backward(loss_of(data[part]))

        All members need the same n: each forward is an exchange among them. Sizes differ by one at most. With more
        parts than samples, some parts repeat a sample with weight 0: their losses change nothing. The losses
        of a part are weighted by its size: call `step.backward` inside the loop.

        Raises:
            ValueError: n is below 1.
        """
        checked("n", n, int, least=1)
        try:
            for share in self.share.parts(n):
                self._begin_part(share)
                yield share.batch
        finally:
            self._begin_part(None)

    def _begin_part(self, share: Share | None) -> None:
        self._part = share
        self._watcher.begin_part(self.weight)

    def backward(self, loss: Tensor, *, count: float | Tensor | None = None) -> None:
        """Backpropagate `loss`, the mean over the batch, weighted by this member's share of the global batch.

        Several calls in a step add up. Inside `micro_batches`, the batch is the current part.

        Args:
            loss: one number. With `count` it is a sum, not a mean.
            count: number of terms of the sum `loss` on this member, 0 or more, such as its tokens without padding. The
                step's gradient is then that of the sum over all members divided by the count over all members. A
                tensor may stay on its device. All members give it, or none.

        Raises:
            ValueError: the loss is no tensor of one number that depends on parameters, or the count no number.
            UnsupportedState: the script has scaled the loss by `torch.amp.GradScaler`.
        """
        check_loss(loss, "step.backward")
        check_count(count)
        if self.loss is not None and (count is None) != (self.count is None):
            raise ValueError("step.backward: count was given in some calls of this step; give it in all, or in none")
        scale = self._watcher.check_loss(loss)
        if count is None:
            part = loss * self.weight
        else:
            has_samples = self.weight > 0
            part = loss if has_samples else loss * 0.0
            self.count = (0.0 if self.count is None else self.count) + (detached(count) if has_samples else 0.0)
        self.loss = part.detach() if self.loss is None else self.loss + part.detach()
        (part if scale == 1 else part * scale).backward()
        self._watcher.end_backward()

    def __enter__(self) -> Any:
        try:
            batch = self.share.batch
        except BaseException as failure:
            self._fail(failure)
            raise
        self.is_entered = True
        self._watcher.begin_step(self)
        self._begin_part(None)
        return batch

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        self._watcher.end_step()
        if kind is None:
            try:
                if self.loss is None:
                    raise RuntimeError("step.backward(loss) was not called inside `with step:`")
                self.committed = self._commit(self)
            except BaseException as failure:
                self._fail(failure)
                raise
            return False
        if isinstance(error, PeerLost):
            self._lose(str(error))  # of another group, too: the session recovers before the next step
            return True
        self._fail(error)
        return False


def check_loss(loss: Any, where: str) -> None:
    """Check a loss that is to be backpropagated.

    Raises:
        ValueError: it is no tensor of one number that depends on parameters; `where` says who asks.
    """
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        found = type(loss).__name__
        if isinstance(loss, Tensor):
            found = f"a tensor of shape {list(loss.shape)}" + ("" if loss.requires_grad else " without a gradient")
        raise ValueError(f"{where}: expected the loss, a tensor of one number with a gradient, got {found}")


def check_count(count: Any) -> None:
    """Check the count of a loss that is a sum.

    Raises:
        ValueError: it is neither None nor a number of 0 or more.
    """
    if isinstance(count, Tensor):
        is_fine = count.numel() == 1
    else:
        is_fine = count is None or (isinstance(count, int | float) and 0 <= count < math.inf)
    if not is_fine:
        found = f"a tensor of shape {list(count.shape)}" if isinstance(count, Tensor) else repr(count)
        raise ValueError(f"expected count to be a number of 0 or more, or a tensor of one, got {found}")


def detached(count: float | Tensor) -> float | Tensor:
    """Return the same number in float64, on its device."""
    return count.detach().double() if isinstance(count, Tensor) else float(count)
