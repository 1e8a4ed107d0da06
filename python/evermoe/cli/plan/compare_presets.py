"""Costs and losses of each preset for one model: the simulator's job, without failures. N nodes of one rank each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from evermoe import _native
from evermoe.cli.plan.auto_plan import Layout
from evermoe.planning.presets import PRESET_NAMES, PresetName
from evermoe.simulate.constants import Constants
from evermoe.simulate.scenario import Scenario, SimulatedOptions
from evermoe.simulate.workload import Workload

LEDGER_TOKENS = 1 << 24
"""Tokens of a layer in a step. A large number, as the ledger counts integers."""
ANY_LOG = 1 << 62
"""Bytes of a log of gradients that has room for all."""


@dataclass(frozen=True)
class PresetRow:
    """Cost and losses of one preset."""

    preset: PresetName
    peer_bytes: float
    """Average bytes sent to peers in a step, per parameter of the model."""
    store_bytes: float
    """Average bytes sent to the store in a step, per parameter of the model."""
    steps_per_version: float | None
    """Steps from one copy of the worst unit to its next, on peers or else in the store; None without copies."""
    delay: float | None
    """Share of a step by which copies prolong it; None if no planner knows it."""
    steps_in_windows: int | None
    """Steps in which windows alone have room for a version; None if more than 4096, or if no planner knows it."""
    survives: float
    """Probability that a copy of everything remains in memory after the loss of one domain."""
    repeated_steps: float
    """Average number of steps that the job repeats when one node fails, without the interrupted one."""
    lost_steps: float
    """Average tokens lost for good when one node fails, in steps of the complete model, from units that go back
    alone."""
    experts_per_snapshot: int | None = None
    """Experts of each layer in a snapshot in own memory; None for presets without such levels."""
    experts_per_save: int | None = None
    """Experts of each layer in a save to the store; None for presets without such levels."""
    restart_lost_steps: float | None = None
    """As `lost_steps`, if all processes end and all nodes survive; None for presets without such levels."""


def compare_presets(layout: Layout) -> list[PresetRow]:
    """Return a row for each preset, in the order of `PRESET_NAMES`, on the placement of that preset.

    Raises:
        ValueError: from a planner: what cannot be planned.
    """
    scenario = _scenario(layout)
    return [_row(layout, json.loads(_native.forecast(scenario, name))) for name in PRESET_NAMES]


def _row(layout: Layout, found: dict[str, Any]) -> PresetRow:
    setting, tokens = layout.setting, LEDGER_TOKENS * layout.steps_tokens
    delay, restart = found["delay_seconds"], found["restart_lost_tokens"]
    return PresetRow(
        preset=found["preset"],
        peer_bytes=found["peer_bytes"] / layout.parameters,
        store_bytes=found["store_bytes"] / layout.parameters,
        steps_per_version=found["version_steps"] and float(found["version_steps"]),
        delay=None if delay is None else delay / setting.step_seconds,
        steps_in_windows=found["window_steps"],
        survives=found["survives"],
        repeated_steps=found["undone_steps"],
        lost_steps=found["lost_tokens"] / tokens,
        experts_per_snapshot=found["experts_per_snapshot"],
        experts_per_save=found["experts_per_save"],
        restart_lost_steps=None if restart is None else restart * setting.snapshot_interval / tokens,
    )


def _scenario(layout: Layout) -> str:
    """Return the job as `Scenario` of src/simulate/scenario.rs; each layer is a class of its own."""
    setting, cluster, (layers, experts) = layout.setting, layout.cluster, layout.share_LE.shape
    workload = Workload(
        name="plan",
        layers=layers,
        classes=layers,
        experts=experts,
        expert_parameters=setting.expert_parameters,
        dense_parameters=setting.dense_parameters,
        step_seconds=setting.step_seconds,
        tokens_per_step=LEDGER_TOKENS,
        state_bytes=setting.state_bytes,
        weight_bytes=0,
        gradient_bytes=setting.gradient_bytes,
        expert_share=0.0,
        network_idle=setting.network_idle,
        replayable=not setting.no_replay,
    )
    options = SimulatedOptions(
        expert_slots=cluster.slots,
        min_replicas=cluster.min_replicas,
        shard_optimizer=setting.dense == "sharded",
        replication=setting.replication,
        copy_budget=setting.budget,
        checkpoint_interval=setting.persist_steps,
        replay_log_bytes=ANY_LOG,
        experts_per_save=setting.experts_per_save,
        save_interval=setting.persist_steps,
        remote_bytes_per_step=setting.remote_bytes_per_step,
    )
    link = setting.network
    constants = Constants(
        network_latency_seconds=link.alpha,
        network_bytes_per_second=link.beta,
        capture_bytes_per_second=setting.host_link.beta,
    )
    scenario = Scenario(
        workload,
        nodes=cluster.nodes,
        nodes_per_rack=cluster.domain_size if cluster.domain_size > 1 else 0,
        host_bytes=setting.host_bytes,
        constants=constants,
        options=options,
        load_trace=((0, tuple(layout.share_LE.ravel().tolist())),),
    )
    given = json.loads(scenario.to_json())
    given["model"]["dense_modules"] = [part * setting.state_bytes for part in layout.dense]
    given["session"]["experts_per_snapshot"] = setting.experts_per_snapshot
    return json.dumps(given)
