"""The elastic session: an ordinary training loop that survives the death of its peers.

    vote before update:   forward, backward → reduce → send → VOTE → update

A member that passes VOTE knows that all have whole gradients, and that whoever keeps copies has what the step needs to
be safe: so a step that one member has seen pass is taken by all, also by those that lose a peer before they know it. On
`PeerLost` anywhere, all go through `agree` and `Recovery` and repeat the interrupted step with the same data. What is
sent when, and from when on a step counts as committed, is `Safety`'s.
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
from typing import Any

import torch
from torch import nn

from evermoe import gradients, progress
from evermoe.balance import is_worth_it
from evermoe.checkpoint import Checkpoints
from evermoe.config import SessionConfig, with_environment
from evermoe.copies import CopyStore
from evermoe.courier import Listener
from evermoe.data import ElasticSampler
from evermoe.elastic import Identity, Membership, start_local_lighthouse
from evermoe.errors import JobFinished, PeerLost, UnitsMissing
from evermoe.parallel import ExpertReducer, complete_gradients, reduce_dense
from evermoe.recovery import Recovery
from evermoe.report import PhaseClock, RecoveryReport
from evermoe.safety import Safety
from evermoe.step import Step
from evermoe.units import TrainingState
from evermoe.versions import generation_of, step_of, version_of
from evermoe.voting import Ballot, Voting

logger = logging.getLogger(__name__)

FINISHED_FILE = "EVERMOE_FINISHED"
"""Environment variable set by `evermoe run`: the file that says that the job is over."""
MOST_ATTEMPTS = 20
"""Recoveries in a row without a committed step, after which the session gives up."""


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
        on_event: called with (name, fields) for: begin, reduce, send, confirm, vote, update, copy, commit, lost, phase,
            arranged, recovered, checkpoint, verified. For progress displays and tests; it must not block. Three more
            come from other threads, and name the step whose state they are about: chunk (a part of a snapshot was
            sent; `sent` of `total` bytes so far), published (a version of some units came from a peer whole, and is
            visible now), held (the gradients of others for the step that comes are in this member's log, but do not
            count before the vote).
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
            role=self.config.role,
        )
        self.membership.generation = self.store.newest_generation()
        self.group = self.membership.group
        """The members that train; `membership.everyone` has replica nodes, too."""
        for layer in self.state.layers.values():
            layer.group = self.group
        self.safety = Safety(self.state, self.store, self.membership, self.config, on_event)
        """What keeps the state safe."""
        self._trains = self.config.role == "train"
        if not self._trains:
            self.state.release()
        self.reports: list[RecoveryReport] = []
        self.loss = float("nan")
        """Mean loss of the last committed step's global batch."""
        self.copied_step = -1
        """Steps that no failure which the preset covers can undo; -1 before the first copies."""
        self._unconfirmed: dict[str, Any] | None = None
        """Of a step that was taken, but whose copies are not whole yet: the event of its commit."""
        self._voting = Voting(self.membership)
        self._missing_since = math.inf
        """Since when some units are in nobody's memory; infinite when none are missing."""
        self._checkpoints = Checkpoints(self.config, self.state, self.group)
        self._version = 0
        self._reducer = ExpertReducer([], [], 0)
        if self._trains:
            self._save_progress()

    @property
    def step(self) -> int:
        """Steps committed so far."""
        return step_of(self._version)

    # ---- the loop

    def steps(self, until: int) -> Iterator[Step]:
        """Yields steps until `until` are committed, and again the one that a failure interrupted.

        On a replica node it yields nothing: it keeps the copies that others send, and returns when they are done.

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
                elif self.step < until and not self._trains:
                    attempts = 0 if self._follow() else self._count_attempt(attempts)
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
            self._confirm_last()
            if self._trains and not self._checkpoints.has(self._version):
                self._checkpoint()
            self._verify()
            self.membership.everyone.all_reduce(torch.ones(1))
        except PeerLost as lost:
            self.group.drop(str(lost))
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
        if not self._left:
            self._left = True
            self.membership.close()
            self.safety.close()
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
        self._voting.begin()
        self.safety.begin_step()
        self._emit("begin", {"step": step.number})

    def _commit(self, step: Step) -> bool:
        try:
            self._emit("reduce", {"step": step.number})
            self._reduce(step.number + 1)
            is_whole, asked = self.safety.finish(step.number + 1)
            self._emit("vote", {"step": step.number})
            sums = self._vote(step, is_whole, asked)
        except PeerLost as lost:
            self.group.drop(str(lost))
            return False
        self._pass(sums)
        if self._checkpoints.is_due(self.step):
            self._try_checkpoint()
        return True

    def _follow(self) -> bool:
        """A step of the others, on a replica node."""
        self.safety.begin_step()
        try:
            is_whole, asked = self.safety.finish(self.step + 1)
            self._emit("vote", {"step": self.step})
            sums = self._voting.poll(self._version, self._ballot(is_whole, asked))
        except PeerLost as lost:
            self.group.drop(str(lost))
            return False
        self._pass(sums)
        return True

    def _pass(self, sums: Ballot) -> None:
        """The vote on a step has passed: it is taken."""
        self._confirm()
        self._emit("update", {"step": self.step})
        self._update(version_of(self.membership.generation, self.step + 1), sums)
        self._emit("copy", {"step": self.step})
        self.safety.begin_copies(self._version)
        members, generation = self.membership.trainers, self.membership.generation
        commit = {"step": self.step - 1, "loss": self.loss, "members": members, "generation": generation}
        if self.safety.commits_late:
            self._unconfirmed = commit
        else:
            self.copied_step = self.step if self.config.copies else -1
            self._emit("commit", commit)
        self._heal_and_pace(sums)

    def _confirm(self) -> None:
        """The copies of the version now are whole everywhere: the step that made it counts as committed."""
        if self._unconfirmed is not None:
            commit, self._unconfirmed = self._unconfirmed, None
            self.copied_step = self.step
            self._emit("commit", commit)

    def _confirm_last(self) -> None:
        """Waits for the copies of the last step, which no other one follows."""
        if self._unconfirmed is not None:
            everyone = self.membership.everyone
            if everyone.all_reduce(torch.tensor([int(self.safety.settle())])) != everyone.size:
                raise PeerLost("the copies of the last step are not whole")
            self._confirm()

    def _reduce(self, coming: int) -> None:
        weights = [layer.weights for layer in self.state.layers.values()]
        complete_gradients([*self.state.dense, *weights], self.group)
        self.safety.begin_exchange(coming)
        reduce_dense(self.state.dense, self.group)
        self._reducer.reduce(gradients.of_experts(self.state), self.group)

    def _vote(self, step: Step, is_safe: bool, asked: int) -> Ballot:
        """All have whole gradients once this returns, with the sums over all members."""
        assert step._loss is not None
        is_clipped = self.config.max_grad_norm is not None
        squares = gradients.squares(self.state, self.group.rank) if is_clipped else 0.0
        mine = self._ballot(is_safe and self.group.is_whole(), asked, loss=float(step._loss), squares=squares)
        return self._voting.poll(self._version, mine)

    def _ballot(self, is_whole: bool, asked: int, *, loss: float = 0.0, squares: float = 0.0) -> Ballot:
        return Ballot(float(is_whole), loss, squares, float(asked), *self.safety.measures())

    def _update(self, version: int, sums: Ballot) -> None:
        """Takes the step that all have voted for."""
        self._voting.passed(self._version, version, sums)
        self.loss = sums.loss
        clip = gradients.clip_factor(sums.squares, self.config.max_grad_norm)
        self.safety.before_update()
        self._version = version
        if self._trains:
            gradients.clip(self.state, clip)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.sampler.advance()
            self.state.add_load()
            self._save_progress()
        self.safety.committed(version, clip)

    def _heal_and_pace(self, sums: Ballot) -> None:
        self.safety.snapshots.set_pace(sums.capture_seconds, sums.step_seconds)
        try:
            if sums.asked:
                self.safety.heal()
            self.safety.pacing.after(self.step)
        except PeerLost as lost:  # the step itself is taken; the next look finds the group broken
            self.group.drop(str(lost))

    def _save_progress(self) -> None:
        self.state.set_progress(progress.collect(self.sampler, self.optimizer, self.scheduler))

    def _try_checkpoint(self) -> None:
        try:
            self._checkpoint()
        except PeerLost as lost:  # the step itself is committed; the next look finds the group broken
            warnings.warn(f"the checkpoint of step {self.step} was not written: {lost}", stacklevel=4)

    def _checkpoint(self) -> None:
        path = self._checkpoints.write(self._version)
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
            on_quorum=lambda: self._on_quorum(clock),
        )
        if not changed:
            if not (rebalance and self._agree_on_moving()):
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
        except PeerLost as lost:
            self.group.drop(str(lost))
            return False
        self._missing_since = math.inf
        self.membership.established = True
        return True

    def _on_quorum(self, clock: PhaseClock) -> None:
        """The group is about to be rebuilt: whatever is under way in it ends."""
        self.group.drop("the membership has changed")
        self.safety.settle()
        clock.enter("rebuild")

    def _agree_on_moving(self) -> bool:
        """Whether the load has shifted so far that experts should move, as those who train see it; collective."""
        nodes = self.membership.nodes[: self.membership.trainers]
        mine = self._trains and is_worth_it(self.state, nodes, self.config, self.safety.ledger.boosted())
        try:
            return float(self.membership.everyone.all_reduce(torch.tensor([float(mine)]))) > 0
        except PeerLost as lost:
            self.group.drop(str(lost))
            return False  # the next look finds the group broken

    def _recover(self, report: RecoveryReport, clock: PhaseClock) -> None:
        self.safety.settle()
        completed = self._voting.complete(self._version)
        if completed is not None:
            self._update(*completed)
        before = self._version if self.membership.established and self._trains else None
        outcome = report.outcome = self._recovery(clock.enter).run()
        self._version = outcome.version
        if self._unconfirmed is not None and self.step <= self._unconfirmed["step"]:
            self._unconfirmed = None  # taken, but never committed
        # versions only ever grow
        self.membership.generation = max(self.membership.generation, generation_of(self._version) + 1)
        if not self._version:  # which is that of any process that has just come, and as good as nothing
            self._version = version_of(self.membership.generation, 0)
        self._checkpoints.forget()
        if self._trains:
            progress.restore(self.state.get_progress(), self.sampler, self.optimizer, self.scheduler)
            layers = list(self.state.layers.values())
            self._reducer = ExpertReducer(
                [layer.matrix_RE for layer in layers],
                [layer.weights.shape[1] for layer in layers],
                self.group.rank,
            )
        self._distinguish(outcome.stale)
        report.lost_tokens = self.safety.count_losses(outcome.stale, self.step, before)
        self._distinguish(outcome.stale)  # what was lost is part of the state
        report.plt = self.safety.ledger.plt
        self.safety.arrange(self.membership.generation, self.membership.id)
        self._emit("copy", {"step": self.step})
        self.safety.protect(self._version)
        self._confirm()
        self.copied_step = self.step if self.config.copies else -1
        self._voting.forget()
        clock.stop()
        report.step, report.members = self.step, self.membership.trainers
        if self.step and not self.membership.established and self.group.rank == 0:
            logger.warning("job %s goes on from step %d", self.membership.identity.job, self.step)
        report.steps_lost = max(0, step_of(outcome.newest) - self.step)
        self.reports.append(report)
        self._emit("recovered", report.fields())

    def _distinguish(self, stale: dict[str, int]) -> None:
        """Another state than that of its version: who still has that must not be taken for a peer."""
        if stale:
            self._version = version_of(self.membership.generation, self.step)
            self.membership.generation += 1

    def _recovery(self, phase: Callable[[str], None]) -> Recovery:
        limit = self.config.rejoin_limit
        return Recovery(
            self.state,
            self.safety.stored(),
            self.membership.everyone,
            self.config,
            lagging=self.safety.lagging,
            boosts=self.safety.ledger.boosted(),
            nodes=self.membership.nodes,
            trainers=self.membership.trainers,
            version=self._version,
            established=self.membership.established,
            saw_running=self.membership.saw_running,
            patient=limit > 0 and time.monotonic() < self._missing_since + limit,
            phase=phase,
        )
