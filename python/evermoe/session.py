"""The elastic session: an ordinary training loop that survives the death of its peers.

    vote before update:   forward, backward → reduce → VOTE → update → copy → CONFIRM = the step is committed

A member that passes VOTE knows that all have whole gradients; one that passes CONFIRM knows that every unit's new
version is whole in all memories, so a committed step is never rolled back while one copy of each unit is left. On
`PeerLost` anywhere, all go through `agree` and `Recovery` and repeat the interrupted step with the same data.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from evermoe import checkpoint, planning, progress
from evermoe.balance import is_worth_it
from evermoe.config import SessionConfig, with_environment
from evermoe.copies import CopyStore, bundles
from evermoe.data import ElasticSampler
from evermoe.elastic import Identity, Membership, start_local_lighthouse
from evermoe.errors import CorruptCopy, JobFinished, PeerLost, UnitsMissing
from evermoe.parallel import ExpertReducer, complete_gradients, reduce_dense
from evermoe.recovery import Recovery
from evermoe.report import Listener, PhaseClock, RecoveryReport
from evermoe.units import TrainingState

logger = logging.getLogger(__name__)

STEP_BITS = 40
"""A version is `generation << STEP_BITS | step`: of two lines of history, the newer membership's wins."""
FINISHED_FILE = "EVERMOE_FINISHED"
"""Environment variable set by `evermoe run`: the file that says that the job is over."""
MOST_ATTEMPTS = 20
"""Recoveries in a row without a committed step, after which the session gives up."""


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


class Session:
    """Trains `model` with whoever is alive. See the module's head for what a step does.

        session = evermoe.Session(model, optimizer, evermoe.ElasticSampler(len(data), batch_size=64))
        for step in session.steps(1000):
            with step:
                step.backward(model.loss(data[step.indices]))

    Args:
        model: any module on one device; its `evermoe.MoE` layers are spread over the members, the rest is replicated.
        optimizer: elementwise, over the model's parameters (torch.optim.AdamW with fused=True is a good choice).
        sampler: divides the global batches.
        scheduler: stepped by the session after each update.
        on_event: called with (name, fields) for: begin, reduce, vote, update, copy, confirm, commit, lost, phase,
            recovered, checkpoint, verified. For progress displays and tests; it must not block.
        options: fields of `SessionConfig`.

    Raises:
        ValueError: an option is wrong. UnsupportedState: the optimizer's state cannot be divided into units.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sampler: ElasticSampler,
        *,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        on_event: Listener = lambda name, fields: None,
        **options: Any,
    ) -> None:
        self.config = with_environment(SessionConfig(**options))
        self.model, self.optimizer, self.sampler, self.scheduler = model, optimizer, sampler, scheduler
        self.state = TrainingState(model, optimizer)
        self._emit = on_event
        job = self.config.job or f"job-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        node = self.config.node or socket.gethostname()
        memory = Path(self.config.memory_dir or "/dev/shm")
        self.store = CopyStore(memory / f"evermoe-{job}" / node, self.state)
        self.store.check_model()
        self._lighthouse: Any = None
        lighthouse = self.config.lighthouse
        if lighthouse is None:
            self._lighthouse, lighthouse = start_local_lighthouse(heartbeat_limit=1, join_limit=5)
        self._left = False
        self.membership = Membership(
            lighthouse=lighthouse,
            identity=Identity(job, self.state.layout, self.config.shared()),
            node=node,
            device=next(model.parameters()).device,
            hang_limit=self.config.hang_limit,
            agree_limit=self.config.agree_limit,
        )
        self.membership.generation = self.store.newest_generation()
        self.group = self.membership.group
        self.reports: list[RecoveryReport] = []
        self.loss = float("nan")
        """Mean loss of the last committed step's global batch."""
        self.copied_step = -1
        """The newest step that is whole in all memories; -1 before the first copy."""
        self._missing_since = math.inf
        """Since when some units are in nobody's memory; infinite when none are missing."""
        self._saved_version = -1
        self._version = 0
        self._reducer = ExpertReducer([], [], 0)
        self._save_progress()

    @property
    def step(self) -> int:
        """Steps committed so far."""
        return _step_of(self._version)

    # ---- the loop

    def steps(self, until: int) -> Iterator[Step]:
        """Yields steps until `until` are committed, and again the one that a failure interrupted.

        Raises:
            LostExperts: more copies were lost than are kept, and no checkpoint is left.
            JoinTimeout: no Lighthouse, or too few members at the start.
        """
        try:
            attempts = 0
            while True:
                before = self.step
                self._check_open()
                if not self._ready(until):
                    attempts = self._count_attempt(attempts)
                elif self.step < until:
                    step = Step(self)
                    yield step
                    if not step._entered:
                        raise RuntimeError("each step of session.steps() must be used as `with step:`")
                    attempts = 0 if self.step > before else self._count_attempt(attempts)
                elif self._finish():
                    break
                else:
                    attempts = self._count_attempt(attempts)
            self.close()
        except JobFinished:
            self.close()
        except BaseException as failure:  # GeneratorExit, too: the caller left the loop
            self._fail(failure)
            raise

    def _fail(self, failure: BaseException | None) -> None:
        """This process gives up: nobody shall wait for it, and its memory stays for the next process."""
        self.group.drop(f"a member failed: {type(failure).__name__}")
        if self.config.job is None:
            self.close()  # nobody could find what a nameless job leaves behind
        else:
            self._leave()

    def _count_attempt(self, attempts: int) -> int:
        if self._missing_since < math.inf:
            return attempts  # bounded by rejoin_limit
        if attempts + 1 >= MOST_ATTEMPTS:
            raise PeerLost(
                f"{MOST_ATTEMPTS} recoveries in a row without a committed step at step {self.step}; the last failure: "
                f"{self.group.broken}"
            )
        return attempts + 1

    def _finish(self) -> bool:
        """The last checkpoint and a farewell, so that nobody leaves while another still needs its copies."""
        try:
            if self.config.checkpoint_dir is not None and self._saved_version != self._version:
                self._checkpoint()
            self._verify()
            self.group.all_reduce(torch.ones(1))
        except PeerLost:
            return False
        if FINISHED_FILE in os.environ:
            Path(os.environ[FINISHED_FILE]).touch()
        return True

    def _stop_if_finished(self) -> None:
        """A process that came too late must not wait for members of a job that is over."""
        if FINISHED_FILE in os.environ and Path(os.environ[FINISHED_FILE]).exists():
            raise JobFinished(f"job {self.config.job} has committed all its steps")

    def _verify(self) -> None:
        """Says whether replicas and copies still equal each other, bit for bit, after all that happened."""
        checked, differing = self._recovery(lambda phase: None).verify()
        if differing:
            warnings.warn(f"replicas or copies differ at step {self.step}: {', '.join(differing[:8])}", stacklevel=3)
        self._emit("verified", {"digests_checked": checked, "digests_mismatched": len(differing), "units": differing})

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """For collective work between steps, such as a validation loss: `with session.evaluation(): …`.

        Puts the model in evaluation mode without gradients. When a peer is lost meanwhile the block ends early
        without an exception, and the session recovers before the next step. Inside the loop of `steps` only.
        """
        self._check_open()
        training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        except PeerLost as lost:
            self.group.drop(str(lost))
        finally:
            self.model.train(training)

    def _check_open(self) -> None:
        if self._left:
            raise RuntimeError(
                "this session has left its job: its steps are done, or its loop was left. Make a new session to go on."
            )

    def close(self) -> None:
        """Leaves the job and removes this member's shared memory.

        `steps` does this when all steps are done. A loop that is left early, by `break` or an error, only leaves the
        job: its memory stays for the processes that go on with it, until somebody calls this.
        """
        self._leave()
        self.store.close(self.membership.id)

    def _leave(self) -> None:
        self._left = True
        self.membership.close()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()
            self._lighthouse = None

    # ---- one step

    def _begin(self, step: Step) -> None:
        if self.config.seed is not None:
            torch.manual_seed(hash((self.config.seed, step.number, self.group.rank)) % 2**63)
        self.optimizer.zero_grad(set_to_none=True)
        self.model.zero_grad(set_to_none=True)
        self.state.reset_load()
        self._emit("begin", {"step": step.number})

    def _commit(self, step: Step) -> bool:
        try:
            self._emit("reduce", {"step": step.number})
            self._reduce()
            self._emit("vote", {"step": step.number})
            loss = self._vote(step)
            self._emit("update", {"step": step.number})
            self._update()
            self._copy(step.number + 1)
        except PeerLost as lost:
            self.group.drop(str(lost))
            return False
        self.loss = loss
        self._emit("commit", {"step": step.number, "loss": loss, "members": self.group.size})
        self._checkpoint_if_due()
        return True

    def _expert_gradients(self) -> list[Tensor]:
        """Per MoE layer; zeros for one that is frozen or was not used on any rank, whose weights have none."""
        weights = [layer.weights for layer in self.state.layers.values()]
        return [torch.zeros_like(w) if w.grad is None else w.grad for w in weights]

    def _reduce(self) -> None:
        weights = [layer.weights for layer in self.state.layers.values()]
        complete_gradients([*self.state.dense, *weights], self.group)
        reduce_dense(self.state.dense, self.group)
        self._reducer.reduce(self._expert_gradients(), self.group)

    def _vote(self, step: Step) -> float:
        """All have whole gradients once this returns; carries the loss and the experts' part of the norm for free."""
        assert step._loss is not None
        squares = 0.0 if self.config.max_grad_norm is None else self._expert_squares()
        whole = float(self.group.is_whole())
        ballot = torch.tensor([whole, float(step._loss), squares], dtype=torch.float64)
        votes, loss, squares = self.group.all_reduce(ballot).tolist()
        if votes != self.group.size:
            raise PeerLost(f"{votes:.0f} of {self.group.size} members voted for step {step.number}")
        if self.config.max_grad_norm is not None:
            self._clip(squares, self.config.max_grad_norm)
        return loss

    def _expert_squares(self) -> float:
        """Sum of squares of the local experts' gradients, each divided by its number of hosts."""
        total = 0.0
        for layer, gradient in zip(self.state.layers.values(), self._expert_gradients(), strict=True):
            hosts = torch.from_numpy(np.count_nonzero(layer.matrix_RE[:, layer.experts], axis=0))
            total += float((gradient.double().square().sum(1).cpu() / hosts).sum())
        return total

    def _clip(self, expert_squares: float, limit: float) -> None:
        gradients = [p.grad for p in self.state.dense if p.grad is not None]
        norm = (expert_squares + sum(float(g.double().square().sum()) for g in gradients)) ** 0.5
        if norm > limit:
            torch._foreach_mul_([*gradients, *self._expert_gradients()], limit / (norm + 1e-6))

    def _update(self) -> None:
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.sampler.advance()
        self.state.add_load()
        self._version = (self.membership.generation << STEP_BITS) | (self.step + 1)
        self._save_progress()

    def _copy(self, step: int) -> None:
        """Copies every unit as the current version; returns when they are whole in all memories.

        Raises:
            CorruptCopy: a peer's copy did not match its digests three times in a row.
        """
        self._emit("copy", {"step": step})
        for _ in range(3):
            whole = self.store.write(self._version, self.group) if self.config.copies else True
            self._emit("confirm", {"step": step})
            if int(self.group.all_reduce(torch.tensor([int(whole)]))) == self.group.size:
                break
        else:
            raise CorruptCopy("copies arrive with other bytes than were sent, three times in a row: check the network")
        if self.config.copies:
            self.copied_step = step
            self.store.prune(self.membership.generation)

    def _save_progress(self) -> None:
        self.state.set_progress(progress.collect(self.sampler, self.optimizer, self.scheduler))

    def _checkpoint_if_due(self) -> None:
        every = self.config.checkpoint_every
        if every and self.step % every == 0:
            try:
                self._checkpoint()
            except PeerLost as lost:  # the step itself is committed; the next look finds the group broken
                warnings.warn(f"the checkpoint of step {self.step} was not written: {lost}", stacklevel=4)

    def _checkpoint(self) -> None:
        assert self.config.checkpoint_dir is not None
        mine = [unit for unit, holders in self._unit_holders() if holders[0] == self.group.rank]
        path = checkpoint.write(
            Path(self.config.checkpoint_dir), self.state, mine, self._version, self.step, self.group
        )
        self._saved_version = self._version
        self._emit("checkpoint", {"step": self.step, "path": str(path)})

    # ---- membership and recovery

    def _ready(self, until: int) -> bool:
        """Agrees on the members and moves experts when it is time to; True when training can go on."""
        settled = self.membership.established and not self.group.broken
        rebalance = settled and self.step < until and self.config.rebalances_at(self.step)
        if settled and self.step % self.config.join_every and not rebalance:
            return True
        report = RecoveryReport(time.time(), reason=self.group.broken or "a look for new members")
        clock = PhaseClock(report.seconds, self._emit)
        if self.group.broken:
            self._emit("lost", {"step": self.step, "reason": self.group.broken})
        clock.enter("agree")
        changed = self.membership.agree(
            expected=self.config.members or 1,
            on_wait=self._stop_if_finished,
            on_quorum=lambda: clock.enter("rebuild"),
        )
        if not changed:
            if not (rebalance and is_worth_it(self.state, self.membership.nodes, self.config)):
                return True
            report.reason = "the load has shifted"
            self.membership.generation += 1
        try:
            self._recover(report, clock)
        except UnitsMissing as missing:
            self._missing_since = min(self._missing_since, time.monotonic())
            self.group.drop(str(missing))
            self._stop_if_finished()
            time.sleep(0.2)  # nothing tells that a holder has come back: agree again and see
            return False
        except PeerLost:
            return False
        self._missing_since = math.inf
        self.membership.established = True
        return True

    def _recover(self, report: RecoveryReport, clock: PhaseClock) -> None:
        report.outcome = self._recovery(clock.enter).run()
        self._version = report.outcome.version
        # versions only ever grow
        self.membership.generation = max(self.membership.generation, (self._version >> STEP_BITS) + 1)
        self._saved_version = -1  # members may differ in what they know to be saved
        progress.restore(self.state.get_progress(), self.sampler, self.optimizer, self.scheduler)
        layers = list(self.state.layers.values())
        self._reducer = ExpertReducer(
            [layer.matrix_RE for layer in layers],
            [layer.weights.shape[1] for layer in layers],
            self.group.rank,
        )
        if self.config.copies:
            units, holders = zip(*self._unit_holders(), strict=True)
            mine = (self.membership.id, self.group.rank)
            self.store.arrange(bundles(units, holders), self.membership.generation, *mine)
        self._copy(self.step)
        clock.stop()
        report.step, report.members = self.step, self.group.size
        if self.step and not self.membership.established and self.group.rank == 0:
            logger.warning("job %s goes on from step %d", self.membership.identity.job, self.step)
        report.steps_lost = max(0, _step_of(report.outcome.newest) - self.step)
        self.reports.append(report)
        self._emit("recovered", report.fields())

    def _recovery(self, phase: Callable[[str], None]) -> Recovery:
        limit = self.config.rejoin_limit
        return Recovery(
            self.state,
            self.store,
            self.group,
            self.config,
            nodes=self.membership.nodes,
            version=self._version,
            established=self.membership.established,
            saw_running=self.membership.saw_running,
            patient=limit > 0 and time.monotonic() < self._missing_since + limit,
            phase=phase,
        )

    def _unit_holders(self) -> list[tuple[str, list[int]]]:
        """Per unit: the ranks that keep its copies, the primary first."""
        everyone = list(range(self.group.size))
        active = [
            everyone
            if unit.layer is None
            else np.flatnonzero(self.state.layers[unit.layer].matrix_RE[:, unit.expert]).tolist()
            for unit in self.state.units
        ]
        primaries = planning.primaries(active, [unit.nbytes for unit in self.state.units], self.group.size)
        holders = planning.unit_copy_holders(primaries, active, self.membership.nodes, max(1, self.config.copies))
        return list(zip((unit.name for unit in self.state.units), holders, strict=True))


def _step_of(version: int) -> int:
    return version & ((1 << STEP_BITS) - 1)
