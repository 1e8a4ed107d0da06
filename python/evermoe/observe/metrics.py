"""Metrics of a member for Prometheus."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from evermoe.events import (
    Begin,
    Checkpoint,
    ChunkSent,
    Commit,
    CorruptionFound,
    CoverageChanged,
    Damaged,
    Event,
    Joined,
    Measured,
    MemberLost,
    Phase,
    Recovered,
    SampleSkipped,
    SickNode,
    Skipped,
    SlowLoader,
    SlowMember,
    Verified,
    Vote,
)

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

STEP_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
"""Bucket bounds of the histogram of steps, in seconds."""
RECENT_STEPS = 16
"""Number of steps over which `recent` metrics are averaged."""
STATES = ("starting", "agree", "rebuild", "fetch", "verify", "training", "finished")
"""States of a member: it starts, is in a phase of a recovery, trains, or has taken all steps."""


class _Metric(NamedTuple):
    kind: str
    """Class of `prometheus_client`."""
    name: str
    """Name without `evermoe_`."""
    what: str
    labels: tuple[str, ...] = ()


METRICS = (
    _Metric("Info", "member", "Job, name, node, rank, role and generation of this member"),
    _Metric("Gauge", "step", "Steps taken that no failure which the preset covers can undo"),
    _Metric("Gauge", "loss", "Mean loss of the last committed step"),
    _Metric("Gauge", "grad_norm", "Norm of its gradient over the complete model, before clipping"),
    _Metric("Gauge", "samples", "Samples that the job has consumed with it"),
    _Metric("Gauge", "counted_tokens", "Tokens that the script has counted so far, with step.backward(count=...)"),
    _Metric("Gauge", "epoch", "Epochs that the job has consumed"),
    _Metric("Gauge", "members", "Members that train"),
    _Metric("Histogram", "step_seconds", "Seconds from the end of the previous step to the end of a step"),
    _Metric("Gauge", "recent_step_seconds", f"Mean of the latest {RECENT_STEPS} steps"),
    _Metric("Counter", "data_seconds", "Seconds that this member waited for its batches"),
    _Metric("Gauge", "recent_data_fraction", f"Part of the latest {RECENT_STEPS} steps in which it waited for them"),
    _Metric("Counter", "slow_loader", "Times that the loader was found to be slow or stuck", ("kind",)),
    _Metric("Gauge", "recent_own_seconds", "Mean of the seconds in which it did not wait for other members"),
    _Metric("Gauge", "slow", "1 while it is slower than the others, mostly in this part of its work", ("part",)),
    _Metric("Counter", "sick_node", "Times that this member's hardware reported a problem", ("action",)),
    _Metric("Counter", "slow_member", "Times that a member was found to be slower than the others", ("member", "part")),
    _Metric("Counter", "tokens", "Tokens in the steps taken, of all members together"),
    _Metric("Gauge", "recent_tokens_per_second", f"Tokens of the latest {RECENT_STEPS} steps over their time"),
    _Metric("Gauge", "imbalance", "Tokens of the busiest member over the mean of all, in the worst layer"),
    _Metric("Gauge", "expert_imbalance", "Tokens of the busiest expert over the mean of all, in the worst layer"),
    _Metric("Gauge", "plt_at_risk", "Portion of the run's tokens that are in no copy of their experts"),
    _Metric("Gauge", "starvation", "Selections since the longest-waiting expert was last copied"),
    _Metric("Gauge", "copy_lag_steps", "Steps by which copies are behind training", ("kind",)),
    _Metric("Counter", "copied_bytes", "Bytes of copies that this member sent", ("kind",)),
    _Metric("Gauge", "copy_waiting_bytes", "Bytes of the current snapshot that are not sent yet"),
    _Metric("Gauge", "checkpoint_step", "Steps in the newest checkpoint"),
    _Metric("Counter", "damaged", "Copies with a wrong digest"),
    _Metric(
        "Gauge", "survives_losses", "Probability that the loss of this number of nodes is survived now", ("nodes",)
    ),
    _Metric("Gauge", "fatal_loss_units", "Units that would be lost with these nodes now", ("nodes",)),
    _Metric("Gauge", "covered", "1 if all copies of the plan are complete, 0 while some are missing"),
    _Metric("Counter", "recoveries", "Recoveries and other changes of members"),
    _Metric("Counter", "recovery_seconds", "Seconds that they took", ("phase",)),
    _Metric("Counter", "lost_members", "Members that were lost", ("kind",)),
    _Metric("Info", "last_recovery", "Reason of the last recovery, what failed, and where units came from"),
    _Metric("Gauge", "last_recovery_seconds", "Seconds of the last one", ("phase",)),
    _Metric("Gauge", "last_recovery_begin_seconds", "When it began, since 1970"),
    _Metric("Counter", "steps_lost", "Committed steps that were undone"),
    _Metric("Counter", "tokens_lost", "Tokens whose updates experts have lost"),
    _Metric("Counter", "skipped", "Updates skipped because a loss or a gradient was not finite"),
    _Metric("Counter", "corruption", "Steps refused because members differed in what must be the same", ("action",)),
    _Metric("Counter", "skipped_samples", "Samples of this member that have raised exceptions and were left out"),
    _Metric("Counter", "fetched_bytes", "Bytes that this member fetched in recoveries"),
)
"""All metrics except `evermoe_state`."""


class Metrics:
    """Metrics of this member for Prometheus, by its official client.

    | metric | kind | what |
    |---|---|---|
    | `evermoe_member_info` | info | labels `job`, `member`, `node`, `rank`, `role`, `generation` |
    | `evermoe_state` | states | `starting`, `training`, `finished`, or the phase of a recovery |
    | `evermoe_step` | gauge | steps taken that no failure which the preset covers can undo |
    | `evermoe_loss` | gauge | mean loss of the last of them |
    | `evermoe_grad_norm` | gauge | norm of its gradient over the complete model, before clipping |
    | `evermoe_samples` | gauge | samples that the job has consumed with it |
    | `evermoe_counted_tokens` | gauge | tokens that the script has counted so far, with `step.backward(count=…)` |
    | `evermoe_epoch` | gauge | epochs that the job has consumed: 1.25 after a quarter of the second one |
    | `evermoe_members` | gauge | members that train |
    | `evermoe_step_seconds` | histogram | seconds from the end of a step, or of a recovery, to that of the next step |
    | `evermoe_recent_step_seconds` | gauge | mean of the latest 16 steps |
    | `evermoe_data_seconds_total` | counter | seconds that this member waited for its batches |
    | `evermoe_recent_data_fraction` | gauge | part of the latest 16 steps in which it waited for them |
    | `evermoe_slow_loader_total` | counter, by `kind` | times that its loader was `slow` or `stuck`: `SlowLoader` |
    | `evermoe_recent_own_seconds` | gauge | part of the latest 16 steps in which it did not wait for others, mean |
    | `evermoe_slow` | gauge, by `part` | 1 while this member is slower than the others: `Measured.slow` |
    | `evermoe_sick_node_total` | counter, by `action` | problems that its hardware has reported: `SickNode` |
    | `evermoe_slow_member_total` | counter, by `member` and `part` | times that a member was found slow: `SlowMember` |
    | `evermoe_tokens_total` | counter | tokens in the steps taken, of all members together |
    | `evermoe_recent_tokens_per_second` | gauge | tokens of the latest 16 steps over their time |
    | `evermoe_imbalance` | gauge | tokens of the busiest member over the mean of all, in the worst layer |
    | `evermoe_expert_imbalance` | gauge | tokens of the busiest expert over the mean of all, in the worst layer |
    | `evermoe_copy_lag_steps` | gauge, by `kind` | steps by which this member's copies are behind: `Measured.lag` |
    | `evermoe_plt_at_risk` | gauge | `moetion`, `pec`: portion of tokens that are in no copy: `Measured.plt_at_risk` |
    | `evermoe_starvation` | gauge | selections since the longest-waiting expert was last copied |
    | `evermoe_copied_bytes_total` | counter, by `kind` | bytes of copies sent, `replayed` and `snapshot` |
    | `evermoe_copy_waiting_bytes` | gauge | bytes of the current snapshot that are not sent yet |
    | `evermoe_checkpoint_step` | gauge | steps in the newest checkpoint |
    | `evermoe_damaged_total` | counter | copies with a wrong digest |
    | `evermoe_survives_losses` | gauge, by `nodes` | probability that the loss of one or two nodes is survived now |
    | `evermoe_fatal_loss_units` | gauge, by `nodes` | units lost with these nodes: `CoverageChanged.fatal` |
    | `evermoe_covered` | gauge | 1 if all copies of the plan are complete, 0 while some are missing |
    | `evermoe_recoveries_total` | counter | recoveries and other changes of members, the start included |
    | `evermoe_lost_members_total` | counter, by `kind` | members that were lost: `MemberLost.kind` |
    | `evermoe_recovery_seconds_total` | counter, by `phase` | seconds that they took |
    | `evermoe_last_recovery_info` | info | labels `reason`, and `failure` and `tier` of `Recovered` |
    | `evermoe_last_recovery_seconds` | gauge, by `phase` | seconds of the last one |
    | `evermoe_last_recovery_begin_seconds` | gauge | when it began, since 1970 |
    | `evermoe_steps_lost_total` | counter | committed steps that were undone |
    | `evermoe_tokens_lost_total` | counter | tokens whose updates experts have lost |
    | `evermoe_skipped_total` | counter | updates skipped because a loss or a gradient was not finite |
    | `evermoe_corruption_total` | counter, by `action` | steps refused as members differed: `CorruptionFound` |
    | `evermoe_skipped_samples_total` | counter | samples of this member that were left out: `SampleSkipped` |
    | `evermoe_fetched_bytes_total` | counter | bytes that this member fetched in recoveries |

    Args:
        port: port at which they are served, at `http://…:port/metrics` on all interfaces; None if they are not
            served, for example because `registry` is served already.
        registry: registry of the metrics; None for a new one.

    Raises:
        ModuleNotFoundError: `prometheus_client` is missing: `pip install 'evermoe[observe]'`.
        OSError: the port is taken.
    """

    def __init__(self, port: int | None = None, *, registry: CollectorRegistry | None = None) -> None:
        import prometheus_client as prometheus

        self.registry = prometheus.CollectorRegistry() if registry is None else registry
        self._of: dict[str, Any] = {}
        """All metrics by name."""
        for each in METRICS:
            options: dict[str, Any] = {"buckets": STEP_BUCKETS} if each.kind == "Histogram" else {}
            make = getattr(prometheus, each.kind)
            self._of[each.name] = make(
                f"evermoe_{each.name}", each.what, each.labels, registry=self.registry, **options
            )
        self._state = prometheus.Enum("evermoe_state", "State of this member", registry=self.registry, states=STATES)
        self._notes: dict[type[Event], Callable[[Any], None]] = {
            Joined: self._note_joined,
            Phase: lambda event: self._state.state(event.phase),
            Begin: lambda event: self._state.state("training"),
            Vote: lambda event: self._state.state("training"),  # a replica node emits no Begin
            Verified: lambda event: self._state.state("finished"),
            Commit: self._note_commit,
            Measured: self._note_measured,
            Skipped: lambda event: self._of["skipped"].inc(),
            CorruptionFound: lambda event: self._of["corruption"].labels(action=event.action).inc(),
            SampleSkipped: lambda event: self._of["skipped_samples"].inc(),
            SlowLoader: lambda event: self._of["slow_loader"].labels(kind=event.kind).inc(),
            SickNode: lambda event: self._of["sick_node"].labels(action=event.action).inc(),
            SlowMember: lambda event: self._of["slow_member"].labels(member=event.member, part=event.part).inc(),
            CoverageChanged: self._note_covered,
            MemberLost: lambda event: self._of["lost_members"].labels(kind=event.kind).inc(),
            Recovered: self._note_recovered,
            ChunkSent: lambda event: self._of["copy_waiting_bytes"].set(event.total - event.sent),
            Damaged: lambda event: self._of["damaged"].inc(),
            Checkpoint: lambda event: self._of["checkpoint_step"].set(event.step),
        }
        self._recent: deque[Measured] = deque(maxlen=RECENT_STEPS)
        self._sent: dict[str, int] = {}
        """Bytes that `copied_bytes` has counted."""
        self._lock = threading.Lock()
        """Held during changes, as events come from several threads."""
        if port is not None:
            prometheus.start_http_server(port, registry=self.registry)

    def __call__(self, event: Event) -> None:
        """Update the metrics from an event."""
        note = self._notes.get(type(event))
        if note is not None:
            with self._lock:
                note(event)

    def _note_joined(self, event: Joined) -> None:
        names = ("job", "member", "node", "rank", "role", "generation")
        self._of["member"].info({name: str(getattr(event, name)) for name in names})

    def _note_commit(self, event: Commit) -> None:
        self._of["step"].set(event.step + 1)
        self._of["loss"].set(event.loss)
        self._of["grad_norm"].set(event.grad_norm)
        self._of["samples"].set(event.samples)
        self._of["counted_tokens"].set(event.tokens)
        self._of["epoch"].set(event.epoch)

    def _note_measured(self, event: Measured) -> None:
        self._recent.append(event)
        seconds, tokens = sum(each.seconds for each in self._recent), sum(each.tokens for each in self._recent)
        self._of["step_seconds"].observe(event.seconds)
        self._of["recent_step_seconds"].set(seconds / len(self._recent))
        self._of["data_seconds"].inc(event.data_seconds)
        waited = sum(each.data_seconds for each in self._recent)
        self._of["recent_data_fraction"].set(waited / seconds if seconds else 0.0)
        self._of["recent_own_seconds"].set(sum(each.own_seconds for each in self._recent) / len(self._recent))
        self._of["slow"].clear()
        if event.slow:
            self._of["slow"].labels(part=event.slow).set(1)
        self._of["tokens"].inc(event.tokens)
        self._of["recent_tokens_per_second"].set(tokens / seconds if seconds else 0.0)
        for name in ("imbalance", "expert_imbalance", "plt_at_risk", "starvation"):
            if (value := getattr(event, name)) is not None:
                self._of[name].set(value)
        self._of["copy_lag_steps"].clear()
        for kind, steps in event.lag.items():
            self._of["copy_lag_steps"].labels(kind=kind).set(steps)
        for kind, nbytes in event.sent_bytes.items():
            self._of["copied_bytes"].labels(kind=kind).inc(nbytes - self._sent.get(kind, 0))
        self._sent = dict(event.sent_bytes)

    def _note_covered(self, event: CoverageChanged) -> None:
        self._of["survives_losses"].labels(nodes="1").set(event.survives_one)
        self._of["survives_losses"].labels(nodes="2").set(event.survives_two)
        self._of["fatal_loss_units"].clear()
        for nodes, units in event.fatal.items():
            self._of["fatal_loss_units"].labels(nodes=nodes).set(units)
        self._of["covered"].set(event.is_complete)

    def _note_recovered(self, event: Recovered) -> None:
        self._state.state("training")
        self._recent.clear()
        self._of["recoveries"].inc()
        names = ("reason", "failure", "tier")
        self._of["last_recovery"].info({name: str(getattr(event, name)) for name in names})
        self._of["last_recovery_begin_seconds"].set(event.started_at)
        self._of["last_recovery_seconds"].clear()
        for phase, seconds in event.seconds.items():
            self._of["recovery_seconds"].labels(phase=phase).inc(seconds)
            self._of["last_recovery_seconds"].labels(phase=phase).set(seconds)
        self._of["steps_lost"].inc(event.steps_lost)
        self._of["tokens_lost"].inc(sum(event.lost_tokens.values()))
        self._of["fetched_bytes"].inc(event.fetched_bytes)
        self._of["step"].set(event.step)
        self._of["members"].set(event.members)
        self._of["copy_waiting_bytes"].set(0)
