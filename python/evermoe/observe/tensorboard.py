"""Curves of a member for TensorBoard."""

from __future__ import annotations

import threading
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from evermoe.events import Event, Verified
from evermoe.observe.curves import Curves
from evermoe.process.warn import warn

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

FLUSH_SECONDS = 5
"""Seconds until events are in the file."""
CLOSE_SECONDS = 10.0
"""Seconds for which the end of a process waits for a disk."""
UNBOUNDED = 0
"""Queue length of the writer. With a bounded queue, a disk that hangs would stop training once the queue is full."""


class TensorBoard:
    """Writes curves of this member to a folder, by `torch.utils.tensorboard` in a separate thread.

    | curve | over | what |
    |---|---|---|
    | `loss`, `grad_norm`, `members` | steps committed | of `Commit` |
    | `progress/samples`, `progress/tokens`, `progress/epoch` | steps committed | of `Commit`, where known |
    | `step/seconds`, `step/data_seconds`, `step/own_seconds` | steps taken | of `Measured` |
    | `step/tokens_per_second` | steps taken | of `Measured` |
    | `load/imbalance`, `load/expert_imbalance` | steps taken | of `Measured` |
    | `copies/plt_at_risk`, `copies/starvation` | steps taken | of `Measured` |
    | `copies/lag/KIND`, `copies/sent_bytes/KIND` | steps taken | of `Measured`: steps behind training; bytes so far |
    | `survives/one_node`, `survives/two_nodes`, `survives/fatal_losses` | steps taken | of `CoverageChanged` |
    | `recovery/PHASE`, `recovery/total` | step of resumption | seconds, of `Recovered` |
    | `recovery/steps_lost`, `recovery/tokens_lost`, `recovery/fetched_bytes` | step of resumption | of `Recovered` |
    | `skipped`, `damaged` | steps taken | updates left out, damaged copies found, so far |
    | `slow_loader`, `slow_member`, `skipped_samples` | steps taken | what was slow, samples left out, so far |
    | `sick_node` | steps taken | problems that the hardware has reported, so far |
    | `corruption` | steps taken | steps refused as members differed, so far |

    TensorBoard shows each folder as a run: give every member a subfolder of a common one. A step that a failure undoes
    has two points in its curves. If the disk is full, a warning is issued once and training continues. While the disk
    hangs, about 2 kB a step wait in memory.

    Args:
        folder: folder of this member; created if it is missing.

    Raises:
        ModuleNotFoundError: `tensorboard` is missing: `pip install 'evermoe[observe]'`.
        OSError: the folder cannot be written to.
    """

    def __init__(self, folder: str | Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.folder = Path(folder)
        self._writer: SummaryWriter | None = SummaryWriter(str(folder), max_queue=UNBOUNDED, flush_secs=FLUSH_SECONDS)
        self._end = weakref.finalize(self, _close, self._writer)
        """Closes the file at the end of the process at the latest."""
        self._curves = Curves()
        self._lock = threading.Lock()
        """Held during writes, as events come from several threads."""

    def __call__(self, event: Event) -> None:
        """Add a point to the curves of an event."""
        step, values = self._curves.points(event)
        with self._lock:
            if self._writer is not None:
                try:
                    for name, value in values.items():
                        self._writer.add_scalar(name, value, step)
                except OSError as error:
                    self._writer = None
                    warn(f"curves cannot be written to {self.folder}: {error}. Training continues")
        if isinstance(event, Verified):
            self.close()

    def close(self) -> None:
        """Write the rest and close the file; later events are ignored."""
        with self._lock:
            self._writer = None
        self._end()


def _close(writer: SummaryWriter) -> None:
    """Close a writer, without a long wait for a disk that hangs."""

    def close() -> None:
        with suppress(OSError):
            writer.close()

    thread = threading.Thread(target=close, name="evermoe-tensorboard", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down
        close()
    else:
        thread.join(CLOSE_SECONDS)
