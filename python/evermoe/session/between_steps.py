"""Work of a script between two steps with all members: evaluate, gather the complete model, work alone, stop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from evermoe.checkpoint import full_state
from evermoe.comm.group import Group
from evermoe.errors import UnsupportedState
from evermoe.options import checked
from evermoe.session.base_session import BaseSession
from evermoe.session.evaluation_data import add_up, own_batches, sum_over
from evermoe.session.session_config import SessionConfig
from evermoe.session.session_driver import SessionDriver
from evermoe.session.substitute_weights import SubstituteWeights


class BetweenSteps(BaseSession):
    """The part of `evermoe.Session` for work between steps."""

    model: nn.Module
    group: Group
    _config: SessionConfig
    has_left: bool
    _driver: SessionDriver

    @property
    def is_main(self) -> bool:
        """Whether this member has rank 0 of those that train: it logs and writes files for all.

        When it is lost, another member has rank 0 after the recovery.
        """
        return self._config.membership.trains and self.group.rank == 0

    @property
    def samples(self) -> int:
        """Samples that the job has consumed, of all members together; also right after a resume. 0 on a replica node.

        Samples of steps whose update was left out count, those of repeated steps once.
        """
        return self._driver.results.samples

    @property
    def tokens(self) -> int:
        """Terms of the losses so far, of all members: sums of `count` in `step.backward(loss, count=…)`.

        They are the tokens without padding, if that is what the script counts. 0 where it gives no counts.
        """
        return self._driver.results.tokens

    @property
    def epoch(self) -> float:
        """Epochs that the job has consumed, such as 1.25 for a quarter of the second one.

        In one of unknown length it stays at the number of complete ones. NaN if the sampler has no attribute `epoch`.
        """
        return self._driver.epoch

    def evaluate(self, data: Any, fn: Callable[[Any], Mapping[str, float | Tensor]]) -> dict[str, float]:
        """Evaluate on all members that train, each on a part of the data; again after a loss.

            def sums(batch):
                x, y = batch
                return {"loss": F.cross_entropy(model(x), y, reduction="sum"), "count": len(y)}

            found = session.evaluate(loader, sums)
            loss = found["loss"] / found["count"]

        All members that train call it, between steps, inside the loop of `steps`. The model is in evaluation mode,
        without gradients. Members may have different numbers of batches, or none, and `fn` may run any number of
        forwards.

        Args:
            data: a `DataLoader` that does not shuffle, a list of batches, or another iterable of batches; the same on
                all members. Member r of n gets batches r, r + n, and so on.
            fn: sums of a batch by name: numbers, or tensors of one number. Divide the sums afterwards, not in `fn`:
                batches may differ in size.

        Returns:
            The sums over all batches in float64, the same on all members. Empty without a batch.

        Raises:
            ValueError: the data is no iterable of batches, or shuffles. TypeError: `fn` returns no numbers by name.
            UnequalForwards: a member did not come to the evaluation within `hang_timeout`.
            RuntimeError: not inside the loop of `steps`, or inside another evaluation.
        """
        check_trains(self)
        work = lambda position, n: sum_over(own_batches(data, position, n), fn)  # noqa: E731
        found: dict[str, float] = self._driver.evaluations.run(self.step, work, add_up, self._recover)
        return found

    def repeated(self, fn: Callable[[], Any]) -> Any:
        """Run `fn` on all members that train, in evaluation mode, and again after a loss.

            metrics = session.repeated(lambda: my_evaluation(session.model))

        Use it for an evaluation that divides its data in its own way, or does not divide it. Members may run different
        numbers of forwards. After a loss `fn` runs again from its beginning on the remaining members. If one of them
        has finished it, all get that result instead.

        Args:
            fn: returns what JSON carries: numbers, texts, None, lists, and dicts with texts as keys.

        Returns:
            The result of the first member that ran it, the same on all members; tuples as lists.

        Raises:
            TypeError: JSON does not carry the result.
            UnequalForwards, RuntimeError: as of `evaluate`.
        """
        check_trains(self)
        return self._driver.evaluations.run(self.step, lambda *_: fn(), lambda parts: parts[0], self._recover)

    def gathered(self, work: Callable[[int, int], Any]) -> list[Any]:
        """Run `work` on all members that train, in evaluation mode, and again after a loss; gather the results.

            parts = session.gathered(lambda position, n: [predict(batch) for batch in batches[position::n]])

        Args:
            work: gets the number of this member among those that work, and how many these are. Returns what JSON
                carries, as of `repeated`.

        Returns:
            The results by those numbers, the same on all members; tuples as lists.

        Raises:
            TypeError, UnequalForwards, RuntimeError: as of `repeated`.
        """
        check_trains(self)
        found: list[Any] = self._driver.evaluations.run(self.step, work, list, self._recover)
        return found

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Run other collective work between steps, such as generation: `with session.evaluation(): …`.

        All members that train enter it, between steps, inside the loop of `steps`. It puts the model in evaluation
        mode, without gradients. Each member may run any number of forwards, also none: at the end of the block it
        serves the others until all are through.

        When a peer is lost meanwhile the block ends early without an exception, and the session recovers before the
        next step. `evaluate` and `repeated` repeat the work instead.

        Raises:
            UnequalForwards: a member did not come within `hang_timeout`; raised by the next `steps`, on all members.
            RuntimeError: not inside the loop of `steps`.
        """
        check_trains(self)
        with self._driver.evaluations.block():
            yield

    @contextmanager
    def alone(self) -> Iterator[bool]:
        """Run long work of one member, without a time limit.

            with session.alone() as is_mine:
                if is_mine:
                    upload(folder)

        All members that train enter it, between steps, inside the loop of `steps`. At the end of the block each waits
        for all others, for longer than `hang_timeout` if need be; so do replica nodes. A death is noticed at once, a
        stopped process after `heartbeat_timeout`: the block then ends without an exception, and the session recovers
        before the next step. The work is not repeated.

        Returns:
            Whether this member has rank 0, as `is_main` says.

        Raises:
            UnequalForwards, RuntimeError: as of `evaluation`.
        """
        check_trains(self)
        with self._driver.evaluations.alone() as is_mine:
            yield is_mine

    def stop(self) -> None:
        """End the job on all members at the same step, as if that were the last one of `steps`.

        Any member may call it, from any thread. Inside a step, the job ends with that step. Between two steps it ends
        at once if all members that train call it; if only some do, it ends with the next step. The last
        checkpoint is written, `steps` ends on all members, and so do replica nodes and spares. Call it for early
        stopping. A `break` leaves the job as it is, for processes that resume it.

        A job that is started again after it was stopped resumes from its checkpoint and trains on.
        """
        self._driver.asks_to_stop = True

    def save(self, path_or_name: str | Path | None = None, *, keep: int | None = None) -> str | None:
        """Write a checkpoint now and wait for it.

            if step.committed and session.loss < best:
                best = session.loss
                session.save("best", keep=1)

        All members that train call it, between steps, inside the loop of `steps`. `evermoe.load_weights` reads the
        checkpoint, and a session whose checkpoints are at that path resumes from it. Call it outside of `EMA.applied`,
        inside of which the parameters are their averages.

        Args:
            path_or_name: a path, a URL, or a name without a slash, which becomes a folder below the session's
                checkpoints. None: one more among the session's own.
            keep: number of the newest checkpoints at that path, this one included, that are kept; the others are
                removed when this one is complete. Those of later steps, which a recovery has undone, stay until a save
                passes them. None: all. The session's own are kept as `Checkpoints` says.

        Returns:
            Path or URL of the checkpoint. None if a member was lost meanwhile: the session recovers before the next
            step, after which the call can be repeated.

        Raises:
            ValueError: None or a name is given, but the session has no location for checkpoints; or `keep` is below 1,
                or given without a path or name.
            PersistFailed: the checkpoint could not be written; the same on all members. Training can continue.
            RuntimeError: not inside the loop of `steps`.
        """
        checked("keep", keep, int | None, least=1)
        if keep is not None and path_or_name is None:
            raise ValueError(
                f"session.save: keep={keep} is for a path or a name; the session's own checkpoints are kept as "
                "Checkpoints(keep=…) says"
            )
        check_trains(self)
        self._driver.evaluations.substitute.put_back()
        return self._driver.saving.save(self._protocol.version, path_or_name, keep)

    def full_state_dict(self, folder: str | Path | None = None) -> dict[str, Any]:
        """Return the complete `model.state_dict()` on rank 0, with the experts of all members; collective.

            if step.committed and session.step % 1000 == 0:
                with session.evaluation():
                    state = session.full_state_dict()

        All members that train call it, between steps, inside the loop of `steps`; replica nodes wait for the next step.
        Experts travel one at a time. When a member is lost, the folder has a complete model or does not exist; the
        session recovers before the next step, and the call can be repeated after it. For a transformers model,
        `evermoe.integrations.transformers.export` writes the files that `from_pretrained` loads.

        Args:
            folder: where rank 0 writes safetensors files with an index, empty or missing; or None. It appears when
                all is on disk. Rank 0 has a layer and a file, of 5 GB at most, in memory. `hang_timeout` must
                allow for writing a file.

        Returns:
            Tensors on the CPU by the model's keys; no step changes them. Empty on the other ranks, and with `folder`.

        Raises:
            PeerLost: a member is gone; inside `evaluation` the block ends instead.
            PersistFailed: rank 0 could not write; the same on all members.
            UnsupportedState: a module around MoE layers changes its state dict; or, with `folder`, not all are tensors.
            UnequalForwards: other members have left an evaluation without this call; or, without `folder`, a member
                has joined while an evaluation is repeated, and has rank 0.
            RuntimeError: not inside the loop of `steps`.
        """
        _check_has_weights(self)
        self._driver.evaluations.come_together(None if folder is None else str(folder), gathers=True)
        if folder is None:
            return full_state.gather(self.model, self.group)
        full_state.write(full_state.pieces(self.model), Path(folder), self.group)
        return {}

    def _recover(self) -> None:
        self._driver.evaluations.substitute.put_back()
        self._protocol.look(self._membership.requests.steps, holds=True)

    def _end_of(self, until: int) -> int:
        """Steps after which the job ends: as the script says, or fewer if it was stopped."""
        stopped = self._driver.evaluations.stopped
        return until if stopped is None else min(until, stopped)

    def _stop_if_asked(self) -> None:
        """End the job between two steps if all members ask for that; if only some do, the next vote ends it."""
        driver = self._driver
        if not driver.asks_to_stop or driver.evaluations.stopped is not None or not driver.history.reports:
            return
        if self._config.membership.trains and driver.evaluations.agree_to_stop():
            driver.evaluations.stopped = self.step
            if self._protocol.is_stepping or driver.has_replica_nodes:  # others wait in a step that never comes
                self.group.drop("the job is stopped")

    def _check_stops(self) -> None:
        """Check that a script which has left a step out ends the job, as all others do.

        Where a member is lost before they agree, the step is drawn again after the recovery, and the script can leave
        it out again.

        Raises:
            RuntimeError: it does not.
        """
        self._stop_if_asked()
        driver = self._driver
        is_lost = driver.asks_to_stop and self.group.broken is not None and not driver.evaluations.others_continue
        if driver.evaluations.stopped is None and not is_lost:
            raise RuntimeError(
                "each step of session.steps() must be used as `with step:`"
                + ("; stop() ends a job at once only if all members call it" if self._driver.asks_to_stop else "")
            )


def check_trains(session: BetweenSteps) -> None:
    """Check that the members of a session have weights, and wait for weights that are on their way.

    In an evaluation this member serves others until all have come to the same point of their scripts.

    Raises:
        RuntimeError: the script is not inside the loop of `steps`.
    """
    _check_has_weights(session)
    session._driver.evaluations.come_together()


def _check_has_weights(session: BetweenSteps) -> None:
    check_open(session)
    if not session._driver.history.reports:
        raise RuntimeError("this session has no weights yet: its members meet in `for step in session.steps(n)`")
    session._driver.await_weights()


def prepare_export(session: BetweenSteps, *, is_complete: bool) -> int:
    """Prepare all members of a session to export its model; collective.

    Args:
        session: whose model is exported.
        is_complete: whether the export has all experts of the model.

    Returns:
        The rank that writes.

    Raises:
        RuntimeError: as of `check_trains`.
        UnequalForwards: a member has joined during the evaluation, and the export has a part of the model.
        UnsupportedState: an island divides the model.
    """
    if session._config.mesh is not None:
        raise UnsupportedState(
            "export of a session with a mesh: expected a session without one; session.full_state_dict() gives all of "
            "the model, and `evermoe export` writes the folder from a checkpoint"
        )
    _check_has_weights(session)
    return session._driver.evaluations.come_together(exports=is_complete)


def substitute_of(session: BetweenSteps) -> SubstituteWeights:
    """Return what replaces the weights that a session trains."""
    return session._driver.evaluations.substitute


def check_open(session: BetweenSteps) -> None:
    """Check that a session is still part of its job.

    Raises:
        RuntimeError: it has left.
    """
    if session.has_left:
        raise RuntimeError(
            "this session has left its job: its steps are done, or its loop was left. Make a new session to resume."
        )
