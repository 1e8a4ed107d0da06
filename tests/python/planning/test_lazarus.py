"""Where Lazarus' replicas go: by node, dealt to the node's ranks, and never two of an expert where one may be lost."""

import itertools
import warnings

import numpy as np
import pytest

from evermoe import Placement, planning
from evermoe.planning.placement import failure_domains
from evermoe.planning.presets import PRESETS
from evermoe.state.placement import place_layers

LAYOUTS = [sizes for nodes in (1, 2, 3, 4) for sizes in itertools.combinations_with_replacement((1, 2, 3), nodes)]


def placed(sizes, experts, copies, load, **options):
    """[R, E] replicas on each rank, and the node of each rank."""
    nodes = [f"n{node}" for node, size in enumerate(sizes) for _ in range(size)]
    previous = {"layer": np.zeros((len(nodes), experts), np.int64)}
    config = Placement(**options).resolved(PRESETS["lazarus"], copies)
    matrix_RE = place_layers({"layer": experts}, [load], previous, nodes, config, {})["layer"]
    return matrix_RE, nodes


@pytest.mark.parametrize("copies", [1, 2, 3])
@pytest.mark.parametrize("experts", [1, 2, 3, 5, 6, 8])
@pytest.mark.few(8)
def test_every_expert_is_on_as_many_nodes_as_copies_are_asked_for(experts, copies):
    random = np.random.default_rng(experts * 10 + copies)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sizes in LAYOUTS:
            for load in (np.zeros(experts), np.ones(experts), random.zipf(1.5, experts) % 10_000):
                matrix_RE, nodes = placed(sizes, experts, copies, load.tolist())
                failing = nodes if len(sizes) > 1 else range(len(nodes))  # one node's ranks protect against crashes
                on = [{node for node, held in zip(failing, column, strict=True) if held} for column in matrix_RE.T]
                assert min(map(len, on)) >= min(copies, len(set(failing))), (sizes, load)


def test_a_hot_expert_has_several_replicas_on_a_rank():
    matrix_RE, _ = placed((2, 2), 4, 1, [1, 1, 1, 97], expert_slots=4)
    assert matrix_RE.sum(0).tolist() == [1, 1, 1, 13]
    assert matrix_RE.sum(1).tolist() == [4] * 4
    assert matrix_RE[:, 3].max() == 4
    # the ranks with more of its replicas get more of its tokens: 13 × 20 of them
    send_ER, _ = planning.split_tokens([[0] * 4, [0] * 4, [0] * 4, [65] * 4], matrix_RE, 0)
    received_R = sum(planning.split_tokens([[0] * 4] * 3 + [[65] * 4], matrix_RE, rank)[0][3] for rank in range(4))
    assert received_R.tolist() == (20 * matrix_RE[:, 3]).tolist()
    assert send_ER.sum() == 65


@pytest.mark.parametrize("sizes", [(2, 2), (1, 2), (2, 2, 2)])
def test_a_node_can_be_lost_where_mro_is_cut(sizes):
    """Three nodes, two slots each, two replicas of three experts: MRO puts the third one's replicas on one node."""
    matrix_RE, nodes = placed(sizes, 6, 2, [1] * 6)
    domains = failure_domains(nodes)
    assert float(planning.recovery_probability(matrix_RE, 1, domains=domains)) == 1
