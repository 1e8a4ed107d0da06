"""Memory of the workers of a session: at the start, in a step and in a recovery, from sizes alone.

    share       parameters, masters, moments, gradients: what a worker trains
    working     temporary, in addition: a layer's second stack, gradients that are being summed
    network     buffers of NCCL, where workers have GPUs
    copies      snapshots in shared memory; in the process replicas, their logs and the messages that feed them

It places experts, owners and copies with the planners that a session uses, for an even load, and counts the bytes of
each rank. Outside of it are activations, which depend on the script, and contexts of GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from evermoe.planning.models import ModelShape
from evermoe.planning.nccl_buffers import nccl_bytes
from evermoe.planning.seating import FootprintOptions, Seating

PhaseName = Literal["start", "step", "recovery"]
PHASES: tuple[PhaseName, ...] = ("start", "step", "recovery")
LIBRARY_BYTES = 104 << 20
"""Bytes that a process takes when a session begins, in addition to `import torch`: evermoe, torchft, torch's
optimizers. Measured by `benches/bench_memory.py`."""
KEPT_BYTES = 64 << 20
"""Freed memory that the C library keeps of a layer's gradients, at most, and again in a thread that sends them: twice
the largest block that it takes from an arena (glibc)."""
BUCKET_BYTES = 25 << 20
"""Size of an all-reduce bucket, as in DistributedDataParallel."""
BUCKETS, SENT_BUCKETS = 3, 2
"""Buckets that a sum has at a time: what is sent, what comes, and their sum; and an exchange without one."""


class Use(NamedTuple):
    """Bytes of one worker at one moment."""

    parameters: int = 0
    masters: int = 0
    moments: int = 0
    gradients: int = 0
    working: int = 0
    """Temporary, on their device: stacks of a layer that is replaced, buckets, gradients that are being computed."""
    network: int = 0
    """Buffers of NCCL's communicators, where the parameters are on a GPU."""
    fetched: int = 0
    """Units that a recovery moves, in host memory: those that have come, and those that are retained."""
    replicas: int = 0
    """States of other workers' units, kept by repeating their steps."""
    log: int = 0
    """Gradients of them that are logged."""
    messages: int = 0
    """Gradients that are encoded, sent and received."""
    snapshots: int = 0
    """Reserved in shared memory."""
    buffers: int = 0
    """Data that is being written to a folder."""
    libraries: int = LIBRARY_BYTES
    """The rest of the process, and freed memory that the C library keeps."""

    @property
    def share(self) -> int:
        """State that the worker trains: parameters, masters, moments, gradients."""
        return self.parameters + self.masters + self.moments + self.gradients

    @property
    def device(self) -> int:
        """On the device of the parameters, where that is a GPU."""
        return self.share + self.working + self.network

    @property
    def host(self) -> int:
        """The process's host memory in addition to these, without shared memory."""
        return self.fetched + self.replicas + self.log + self.messages + self.buffers + self.libraries

    @property
    def process(self) -> int:
        """In a process whose device is the CPU, without shared memory."""
        return self.share + self.working + self.host


class Moment(NamedTuple):
    """A moment at which a worker's memory may be at its largest."""

    phase: PhaseName
    name: str
    uses: list[Use]
    """By rank."""


class Footprint(NamedTuple):
    """Memory of the workers of a session."""

    moments: list[Moment]

    def peak(self, phase: PhaseName, by: Callable[[Use], int] = lambda use: use.device) -> tuple[str, Use]:
        """Return the peak of a phase: its name and the bytes of the largest worker."""
        each = [(moment.name, use) for moment in self.moments if moment.phase == phase for use in moment.uses]
        return max(each, key=lambda found: (by(found[1]), found[1].host + found[1].snapshots))


def footprint(shape: ModelShape, options: FootprintOptions, *, is_roomy: bool = False) -> Footprint:
    """Forecast each worker's memory at the start, in a step, and in a recovery from the loss of `options.faults` nodes.

    The recovery is left out where no node would be left.

    Args:
        shape: of the model.
        options: of the session.
        is_roomy: whether hosts have enough memory to make a recovery's copies while the step is repeated and the
            previous copies still exist. Without it training waits for them, and the result is the minimum.

    Raises:
        ValueError: from the planners: what cannot be placed.
    """
    before = Seating(shape, options, options.nodes)
    moments = [*_start(before), _step(before)]
    left = options.workers - options.faults * options.workers_per_node
    if left > 0 and options.faults:
        moments += _recovery(before, Seating(shape, options, options.nodes[:left], before), is_roomy)
    return Footprint(moments)


def _trained(seating: Seating, rank: int) -> Use:
    """Parameters and the optimizer's state."""
    options, stepped = seating.options, int(seating.stepped_R[rank])
    communicators = 2 if _sums_in_background(seating) else 1
    return Use(
        parameters=int(seating.held_R[rank]) * options.weight_bytes,
        masters=stepped * options.master_bytes,
        moments=stepped * options.moments * 4,
        network=communicators * nccl_bytes(seating.ranks, options.workers_per_node),
        libraries=LIBRARY_BYTES + min(KEPT_BYTES, seating.layer_gradients(rank)),
    )


def _sums_in_background(seating: Seating) -> bool:
    """Return whether gradients are summed during backward, in a communicator of their own."""
    return seating.ranks > 1 and seating.gradient_bytes > BUCKET_BYTES


def _bucket_bytes(seating: Seating, shared: int = 0) -> int:
    """Bytes of a bucket of what is no expert, and of a number of parameters of experts."""
    return min(BUCKET_BYTES, (seating.shape.trained_dense_parameters + shared) * seating.options.weight_bytes)


def _start(seating: Seating) -> list[Moment]:
    """Owners send their weights; then the copies of the first state are made. There are no gradients."""
    sending, copying = [], []
    for rank in range(seating.ranks):
        use, copies = _trained(seating, rank), seating.copies[rank]
        sending.append(use._replace(working=SENT_BUCKETS * _bucket_bytes(seating) if seating.is_sharded else 0))
        copying.append(
            use._replace(
                replicas=copies.replicas,
                messages=copies.first_states,
                snapshots=copies.snapshots,
                buffers=copies.buffers,
            )
        )
    return [Moment("start", "weights exist", sending), Moment("start", "copies are made", copying)]


def _step(seating: Seating) -> Moment:
    """All gradients are complete and on their way to other ranks."""
    options, uses = seating.options, []
    in_background = _sums_in_background(seating)
    for rank in range(seating.ranks):
        copies = seating.copies[rank]
        # A layer's gradient is put together from those of its matrices, and each of these from those of its experts.
        layer = seating.layer_gradients(rank)
        # Sums of experts are made in the buffers of their buckets, those of the rest next to the gradients.
        early = int(seating.owned_R[rank]) * options.weight_bytes - BUCKET_BYTES  # the last bucket is not early
        buckets = 0 if seating.ranks == 1 else BUCKETS * _bucket_bytes(seating, int(seating.shared_R[rank]))
        use = _trained(seating, rank)
        uses.append(
            use._replace(
                gradients=int(seating.trained_R[rank]) * options.weight_bytes,
                working=max(layer * 4 // 3, buckets)
                + (max(0, early) if in_background else 0)
                + seating.adapted_bytes(rank),
                replicas=copies.replicas,
                log=copies.log,
                messages=copies.records + copies.sent + copies.received,
                snapshots=copies.snapshots,
                buffers=copies.buffers,
                libraries=use.libraries + (min(KEPT_BYTES, layer) if in_background else 0),
            )
        )
    return Moment("step", "gradients are reduced", uses)


def _recovery(old: Seating, new: Seating, is_roomy: bool) -> list[Moment]:
    """Moments of the remaining workers: the first ones, since all are equal."""
    step, start = _step(old).uses[: new.ranks], _start(new)[-1].uses
    fetched_R, retained_R = new.moved_R(old=False), new.moved_R(old=True)
    after = _step(new).uses
    lost, moving, protecting = [], [], []
    for rank, use in enumerate(step):
        copies = old.copies[rank]
        between = use._replace(working=0, messages=copies.records + copies.frames)
        lost.append(between)
        fetched, retained = int(fetched_R[rank]), int(retained_R[rank])
        # Logs are worked off; where the others' copies are a step late, the step before is kept of each replica, too.
        quiet = between._replace(gradients=0, log=0, replicas=copies.replicas * (2 if old.copies_late else 1))
        layers = old.shape.layers
        travelling = max(fetched + retained // layers, retained + fetched // layers)  # layer by layer one gives way
        moving.append(quiet._replace(working=new.layer_bytes(rank), fetched=travelling))
        repeating = after[rank] if is_roomy and old.options.replication else start[rank]
        protecting.append(
            repeating._replace(
                fetched=retained,
                replicas=repeating.replicas + quiet.replicas,
                snapshots=repeating.snapshots + quiet.snapshots,
                messages=max(start[rank].messages, repeating.messages) + quiet.messages,
                libraries=use.libraries,
            )
        )
    return [
        Moment("recovery", "the loss", lost),
        Moment("recovery", "units arrive", moving),
        Moment("recovery", "copies are made", protecting),
    ]
