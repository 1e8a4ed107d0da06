"""A cluster, its failures, and a session's options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from evermoe import _native
from evermoe.planning.models import dense_modules
from evermoe.simulate.constants import Constants
from evermoe.simulate.workload import Workload

DAY = 86_400.0


@dataclass(frozen=True)
class Failure:
    """Cause of losses and returns of nodes, created by one of the functions below. Several add up."""

    fields: dict[str, Any]
    """Fields of `Source` in `src/simulate/failures.rs`."""

    @staticmethod
    def poisson(*, mtbf_seconds: float, repair_seconds: float | None) -> Failure:
        """Return failures of single nodes.

        Args:
            mtbf_seconds: mean time between two failures of any node, while all are up.
            repair_seconds: seconds until the node or a replacement returns; None for never.
        """
        return Failure({"kind": "poisson", "mtbf_seconds": mtbf_seconds, "repair_seconds": repair_seconds})

    @staticmethod
    def racks(*, nodes_per_rack: int, mtbf_seconds: float, repair_seconds: float | None) -> Failure:
        """Return failures of complete racks of consecutive nodes; otherwise as `poisson`."""
        given = {"nodes_per_rack": nodes_per_rack, "mtbf_seconds": mtbf_seconds, "repair_seconds": repair_seconds}
        return Failure({"kind": "racks", **given})

    @staticmethod
    def maintenance(*, every_seconds: float, nodes: int, seconds: float) -> Failure:
        """Return periodic maintenance that takes a number of nodes out of service for a while, after a notice."""
        return Failure({"kind": "maintenance", "every_seconds": every_seconds, "nodes": nodes, "seconds": seconds})

    @staticmethod
    def stragglers(*, mtbf_seconds: float, factor: float, seconds: float) -> Failure:
        """Return slowdowns of nodes by a factor for a while; all nodes wait for them."""
        return Failure({"kind": "stragglers", "mtbf_seconds": mtbf_seconds, "factor": factor, "seconds": seconds})

    @staticmethod
    def in_steps(losses: Sequence[tuple[int, Sequence[int]]]) -> Failure:
        """Return losses of nodes for good in the middle of steps.

        Args:
            losses: number of a step and the lost nodes.
        """
        return Failure({"kind": "steps", "losses": [(step, list(nodes)) for step, nodes in losses]})

    @staticmethod
    def at_times(events: Sequence[tuple[float, bool, Sequence[int]]]) -> Failure:
        """Return losses and arrivals of nodes at given times; a node does not exist before it arrives.

        Args:
            events: seconds from the start, whether nodes arrive, and their numbers, in order of time.
        """
        return Failure({"kind": "trace", "events": [(at, comes, list(nodes)) for at, comes, nodes in events]})

    @staticmethod
    def trace(*paths: str | Path) -> Failure:
        """Return the failures of a trace: a file in Bamboo's format (`milliseconds,add|remove,node`), or SkyPilot's,
        one per node.

        Raises:
            ValueError: a file has a wrong format; the message names it. OSError: a file cannot be read.
        """
        texts = [Path(path).read_text(encoding="utf-8") for path in paths]
        try:
            if len(texts) == 1 and not texts[0].lstrip().startswith("{"):
                return Failure(json.loads(_native.read_bamboo(texts[0])))
            return Failure(json.loads(_native.read_skypilot(texts)))
        except ValueError as error:
            raise ValueError(f"{', '.join(map(str, paths))}: {error}") from None

    @property
    def most_nodes(self) -> int:
        """Number of nodes that a trace names; 0 for other causes."""
        nodes = (node for _, _, nodes in self.fields.get("events", ()) for node in nodes)
        return max(nodes, default=-1) + 1


@dataclass(frozen=True, kw_only=True)
class SimulatedOptions:
    """Options of a session, as in `evermoe.Session`, and of its simulation."""

    expert_slots: int | None = None
    most_slots: int | None = None
    """Largest number of replicas per layer for which a node has memory; a job that needs more waits for nodes."""
    min_replicas: int | None = None
    shard_optimizer: bool = False
    """Keep the optimizer state of each dense module on one node; False: on every device."""
    replication: int = 2
    copy_budget: float = 0.01
    snapshot_interval: int | None = None
    join_interval: int = 1
    rebalance_interval: int = 100
    rejoin_timeout: float = 30.0
    checkpoint_interval: int = 250
    """Steps between checkpoints, 250 as for Lazarus in its section 6.4; 0 for none. For `restart` and
    `restart-groups` see `Scenario.restart_interval`."""
    replay_log_bytes: int = 1 << 30
    experts_per_save: int | None = None
    save_interval: int = 1
    max_lost_token_fraction: float = 1.0
    remote_bytes_per_step: int | None = None
    replans: bool = True
    """Whether experts and copies are planned again at every change, as in a session. Otherwise newcomers take over
    the units of lost nodes, and all is planned again only if an expert would have no node. That is faster to
    simulate."""


@dataclass(frozen=True)
class Scenario:
    """A job on a failing cluster.

    Raises:
        ValueError: from `simulate`, with the field, what was expected and what came.
    """

    workload: Workload
    nodes: int
    """Nodes that train. The devices of a node fail together: a node is one member."""
    days: float = 1.0
    """Simulated days, at most."""
    steps: int | None = None
    """Steps after which the job is over; None if only time ends it."""
    spares: int = 0
    """Nodes that stand by to replace lost ones."""
    devices: int = 1
    """Devices of a node. Each has a process with all dense parameters and a part of the node's experts."""
    nodes_per_rack: int = 0
    """Consecutive nodes that share a rack, over which copies and replicas are spread; 0 for no racks."""
    host_bytes: int = 1 << 40
    """Free host memory of a node for copies. Copies that do not fit are missing: see `Outcome.missing_copy_bytes`."""
    failures: tuple[Failure, ...] = ()
    constants: Constants = field(default_factory=Constants)
    options: SimulatedOptions = field(default_factory=SimulatedOptions)
    zipf: float = 0.0
    """Zipf exponent of the experts' load at the start; 0 is even."""
    drift: float = 0.0
    """Standard deviation of the change of the logarithm of each expert's load."""
    drift_interval: int = 100
    """Steps between two changes of the load."""
    load_trace: tuple[tuple[int, tuple[float, ...]], ...] = ()
    """(step, tokens of each expert of each class from it on); replaces the synthetic load."""
    expert_parallel: int | None = None
    """Nodes that share the experts in `restart` and `restart-groups`; None for 2, or all if there are fewer."""
    restart_interval: int = 50
    """Steps between the checkpoints of `restart` and `restart-groups`: 50 for DS in Lazarus, section 6.1."""
    join_seconds: float = 120.0
    """Seconds for which `restart` and `restart-groups` gather new nodes: 2 minutes in Lazarus, section 6.4."""

    def failing(self, *failures: Failure) -> Scenario:
        """Return the scenario with these failures added."""
        return replace(self, failures=(*self.failures, *failures))

    def to_json(self) -> str:
        """Return the fields of `Scenario` in `src/simulate/scenario.rs`."""
        constants, workload = self.constants, self.workload
        modules = dense_modules(workload.dense_parameters, workload.largest_module, workload.layers)
        given = {
            "cluster": {
                "nodes": self.nodes,
                "spares": self.spares,
                "devices": self.devices,
                "nodes_per_rack": self.nodes_per_rack,
                "network_latency_seconds": constants.network_latency_seconds,
                "network_bytes_per_second": constants.network_bytes_per_second,
                "host_bytes": self.host_bytes,
            },
            "costs": {
                "detect_seconds": constants.detect_seconds,
                "agree_seconds": constants.agree_seconds,
                "rebuild_seconds": constants.rebuild_seconds,
                "rebuild_seconds_per_node": constants.rebuild_seconds_per_node,
                "survey_seconds": constants.survey_seconds,
                "digest_bytes_per_second": constants.digest_bytes_per_second,
                "capture_bytes_per_second": constants.capture_bytes_per_second,
                "store_write_bytes_per_second": constants.store_write_bytes_per_second,
                "store_read_bytes_per_second": constants.store_read_bytes_per_second,
                "store_bytes_per_second": constants.store_bytes_per_second,
                "persist_seconds": constants.persist_seconds,
                "start_seconds": constants.start_seconds,
            },
            "model": {
                "layers": workload.layers,
                "classes": workload.classes,
                "experts": workload.experts,
                "expert_state_bytes": workload.expert_parameters * workload.state_bytes,
                "expert_gradient_bytes": workload.expert_parameters * workload.gradient_bytes,
                "dense_modules": [parameters * workload.state_bytes for parameters in modules],
                "dense_weight_bytes": workload.dense_parameters * workload.weight_bytes,
                "tokens_per_step": workload.tokens_per_step,
                "step_seconds": workload.step_seconds,
                "scaling": workload.scaling,
                "expert_share": workload.expert_share,
                "network_idle": workload.network_idle,
                "replayable": workload.replayable,
            },
            "load": {
                "zipf": self.zipf,
                "drift": self.drift,
                "drift_interval": self.drift_interval,
                "trace": self.load_trace,
            },
            "session": _as_simulated(self.options),
            "failures": [failure.fields for failure in self.failures],
            "seconds": self.days * DAY,
            "steps": self.steps,
        }
        return json.dumps(given)


def _as_simulated(options: SimulatedOptions) -> dict[str, Any]:
    """Return the options by the names that the simulator has for them."""
    given = vars(options) | {"dense": "sharded" if options.shard_optimizer else "replicated"}
    del given["shard_optimizer"]
    return {{"replication": "copies", "expert_slots": "slots"}.get(name, name): value for name, value in given.items()}
