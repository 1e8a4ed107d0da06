"""Early comparison of what several ranks hold, so that state which differs is named before it spreads."""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from evermoe.comm.gather import gather_json
from evermoe.comm.group import Group
from evermoe.errors import UnsupportedState
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import LOOP_UNITS, digests_of

logger = logging.getLogger(__name__)

LAST_STEP = 3
"""Ranks compare what they hold after this number of steps of a job, and after each earlier one."""
PERIOD = 32
"""Steps between later comparisons where the script has code in the optimizer's step, or changes gradients before it."""
SAMPLE_BYTES = 64 << 10
"""Bytes at the begin of each tensor that are compared."""


def are_compared(step: int, *, has_own_code: bool) -> bool:
    """Whether ranks compare what they hold after `step` steps.

    Args:
        step: steps taken.
        has_own_code: whether a script's code runs in the optimizer's step, or changes gradients before it.
    """
    return step <= LAST_STEP or (has_own_code and step % PERIOD == 0)


def compare_replicas(state: TrainingState, group: Group) -> None:
    """Compares the begin of each tensor that several ranks hold: weights, buffers and the optimizer's; collective.

    Buffers that differ are named in a warning: a recovery gives all ranks those of one.

    Raises:
        UnsupportedState: something else differs; names it, and two ranks.
    """
    if group.size == 1:
        return
    held, holders = set(state.held()), state.active(group.size)
    shared = [unit.name for unit in state.catalog.units if unit.name in held and len(holders[unit.name]) > 1]
    places = {unit.name: place for place, unit in enumerate(state.catalog.units)}
    mine = torch.zeros(len(places), dtype=torch.int64)
    for name, value in zip(shared, _digests(state, shared), strict=True):
        mine[places[name]] = value
    found_RU = group.all_gather(mine).numpy()
    lowest_U = np.where(found_RU == 0, np.iinfo(np.int64).max, found_RU).min(0)
    differs_U = ((found_RU != 0) & (found_RU != lowest_U)).any(0)
    differing = [name for name, place in places.items() if differs_U[place]]
    if differing:
        _name_tensors(state, group, differing)


def _sample(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1)[: SAMPLE_BYTES // tensor.element_size()]


def _digests(state: TrainingState, names: list[str]) -> list[int]:
    """Of the begin of each unit's tensors: int64, not 0."""
    values = digests_of([[_sample(tensor) for tensor in tensors] for tensors in state.tensors(names)])
    return [value % (2**63 - 1) + 1 for value in values]


def _name_tensors(state: TrainingState, group: Group, units: list[str]) -> None:
    """Finds the tensors in which units differ; collective."""
    held, mine = set(state.held()), {}
    for unit in (state.catalog.by_name[name] for name in units if name in held):
        (tensors,) = state.tensors([unit.name])
        for spec, tensor in zip(unit.specs, tensors, strict=True):
            mine[f"{unit.name}/{spec.name}"] = digests_of([[_sample(tensor)]])[0]
    everyone = gather_json(group, mine)
    buffers = []
    for name in dict.fromkeys(name for each in everyone for name in each):
        by_rank = {rank: each[name] for rank, each in enumerate(everyone) if name in each}
        first = min(by_rank)
        other = next((rank for rank, value in by_rank.items() if value != by_rank[first]), None)
        if other is None:
            continue
        where = f"{name} differs between ranks {first} and {other}"
        if _is_buffer(state, *name.split("/", 1)):
            buffers.append(where)
            continue
        raise UnsupportedState(
            f"{where}, which must hold the same: the optimizer, a hook, on_gradients or the script changes it "
            "otherwise on each of them. Use an elementwise optimizer; clip with max_grad_norm, or the gradients' "
            "clip_norm_, whose norm is over all ranks; change state by nothing that depends on the rank or its samples"
        )
    if buffers and group.rank == 0:
        logger.warning(
            "buffer %s: a buffer of the state must be the same on all ranks, and a recovery gives all of them that of "
            "one. Register what belongs to a rank with persistent=False; leave running statistics, as of BatchNorm, "
            "to a layer without them",
            "; ".join(buffers),
        )


def _is_buffer(state: TrainingState, unit: str, name: str) -> bool:
    return unit not in LOOP_UNITS and any(s.is_buffer for s in state.catalog.by_name[unit].specs if s.name == name)
