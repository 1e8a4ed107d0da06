"""Members that were interrupted are not taken for members whose scripts differ."""

from datetime import timedelta

import numpy as np
import pytest
import torch
from torch.distributed import FileStore

from evermoe import Expert, Experts
from evermoe.errors import PeerLost, UnequalForwards
from evermoe.session.step_calls import StepCalls
from support.ranks import members, run_each

LIMIT = timedelta(seconds=3)


def forward(layer):
    layer(torch.ones(3, 4), torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))


def interrupted(group, folder, forwards, attempts):
    """Rank 0 ends its step after two forwards; the other runs as many or one more, then its peer is gone.

    They agree again, in the group that the layer uses, before they compare what they have begun.
    """
    training, _ = members(group, folder, LIMIT.total_seconds())
    layer = Experts(Expert(4, 4), 2)
    layer.group, layer.matrix_RE = training, np.ones((2, 2), np.int64)
    calls = StepCalls({"moe": layer}, training, f"n{group.rank}")
    calls.check(group)  # before any step
    calls.begin(3, attempts[group.rank])
    for _ in range(2):
        forward(layer)
    if group.rank == 0:
        calls.end()
    elif forwards > 2:
        with pytest.raises(PeerLost):
            forward(layer)
    training.drop("a test")
    with pytest.raises(PeerLost):  # as an evaluation after a step that was not committed
        forward(layer)
    training.rebuild(FileStore(f"{folder}/again", group.size), group.rank, group.size, torch.device("cpu"), LIMIT)
    training.all_reduce(torch.ones(1))
    try:
        calls.check(training)
    except UnequalForwards as error:
        return str(error)
    return ""


CASES = [
    (2, (7, 7), ""),
    (3, (7, 6), ""),  # of an earlier attempt
    (3, (7, 7), "step 3: rank 1 on n1 ran 3 forwards of layer moe, rank 0 on n0 ran 2. "),
]


def test_unequal_are_those_that_began_more_than_one_that_has_ended(tmp_path):
    arguments = []
    for number, (forwards, attempts, _) in enumerate(CASES):
        (tmp_path / str(number)).mkdir()
        arguments.append((str(tmp_path / str(number)), forwards, attempts))
    for (*_, message), results in zip(CASES, run_each(tmp_path, 2, interrupted, arguments), strict=True):
        for found in results:
            assert found[: len(message)] == message
            assert bool(found) == bool(message)
