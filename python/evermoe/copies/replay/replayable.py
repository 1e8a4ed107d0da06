"""Optimizers and units whose steps replicas can repeat."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch

from evermoe.copies.replay.calibrate import Arithmetics, calibrate
from evermoe.copies.replay.part import part_name, parts_of
from evermoe.copies.replay.sender import FUSED_ROW
from evermoe.copies.replay.source import Rule
from evermoe.copies.replay.step_code import foreign_code, foreign_step, refuse_foreign_code
from evermoe.errors import NotReplayable
from evermoe.optim.combined import each_of
from evermoe.optim.ema import is_averaged
from evermoe.optim.masters import MASTER
from evermoe.state.still import is_frozen
from evermoe.state.training_state import TrainingState
from evermoe.state.unit import TensorSpec, Unit

logger = logging.getLogger(__name__)


def find_arithmetics(optimizer: torch.optim.Optimizer) -> Arithmetics:
    """Return the arithmetic of each optimizer whose steps can be repeated; a warning names the others.

    Raises:
        UnsupportedState: steps could be repeated, but code of the script runs in them.
    """
    found = {}
    for each in each_of(optimizer):
        try:
            if is_averaged(each):
                raise NotReplayable("an average of the weights is kept, which gradients alone cannot reproduce")
            foreign = foreign_step(each)
            if foreign is not None:
                raise NotReplayable(
                    f"{foreign} is neither torch's nor evermoe's, so no trial covers all that it may do"
                )
            found[each] = calibrate(each)
        except NotReplayable as error:
            logger.warning(
                "copies of what %s steps are snapshots of the state, which take several times the bytes of gradients: "
                "%s",
                type(each).__name__,
                error,
            )
    refuse_code_in(found)
    return found


def refuse_code_in(arithmetics: Arithmetics) -> None:
    """Refuse code of the script in steps that replicas repeat.

    Raises:
        UnsupportedState: code was found; the message names it and says what to do instead.
    """
    for each in arithmetics:
        refuse_foreign_code(foreign_code(each))


def can_replay(state: TrainingState, unit: str, rules: Mapping[int, Rule]) -> bool:
    """Whether the steps of a unit that one rank trains can be repeated from its gradients, by the rules of parameters.

    They must be steps of an expert, or of a unit with an owner and no buffers. All its parameters must have rules, and
    be float32 or have float32 masters. A frozen unit takes no steps, so that none must be repeated.
    """
    if is_frozen(state, unit):
        return True
    found = state.catalog.by_name[unit]
    return (found.layer is not None or unit in state.owners.units) and is_repeatable(state, found, rules)


def is_repeatable(state: TrainingState, found: Unit, rules: Mapping[int, Rule]) -> bool:
    """Whether the steps of a complete unit can be repeated from the gradients that its optimizer sees.

    The conditions are those of `can_replay`, except that any number of ranks may train the unit.
    """
    if not all(_is_exact(specs) for specs in parts_of(found)):
        return False
    if found.layer is None:
        return all(id(p) in rules for p in state.dense_tensors(found.name).values())
    weights = state.layers[found.layer].weights
    rule = rules.get(id(weights))
    return rule is not None and (rule.arithmetic.variant != "torch_cpu_fused" or weights.shape[1] % FUSED_ROW == 0)


def _is_exact(specs: Sequence[TensorSpec]) -> bool:
    """Whether the state of a parameter is float32, or the parameter rounds a master that is."""
    parameter, *kept = specs
    if any(spec.dtype != torch.float32 for spec in kept):
        return False
    if parameter.dtype == torch.float32:
        return True
    has_master = any(spec.name == part_name(parameter.name, MASTER) for spec in kept)
    return has_master and math.prod(parameter.shape) % 2 == 0  # the sender requires it, too
