"""The typed face of the choice of copies."""

import pytest

from evermoe.planning import CopyNode, CopyUnit, choose_copies, schedule

LINK = schedule.Link(0.0, 1e4)
NODES = [CopyNode(1e-3, domain, 10_000, network_seconds=0.1, host_link_seconds=0.2) for domain in range(4)]


def choose(units, nodes=NODES, **options):
    return choose_copies(units, nodes, network=LINK, host_link=schedule.Link(0.0, 1e5), step_seconds=1.0, **options)


def test_each_kind_with_what_it_takes():
    units = [
        CopyUnit(1200, 200, [0, 1], 64),
        CopyUnit(1200, 200, [0], 64),
        CopyUnit(1200, 0, [1], 0),
        CopyUnit(800, 200, [2], 64, replayable=False),
    ]
    plan = choose(units, budget=0.0)
    assert [unit.kind for unit in plan.units] == ["active", "replayed", "replayed", "snapshot"]
    assert [unit.reason for unit in plan.units] == ["held_actively", "gradient_is_smaller", "idle", "not_replayable"]
    assert [unit.bytes for unit in plan.units] == [0, 200, 0, 800]
    assert all(unit.covered for unit in plan.units)
    assert plan.delay_seconds == 0.0
    assert sum(node.sent_bytes for node in plan.nodes) == sum(node.received_bytes for node in plan.nodes) == 1000
    # the state and eight gradients; the state alone if idle; twice the state
    assert sum(node.host_bytes for node in plan.nodes) == 1200 + 8 * 200 + 1200 + 2 * 800
    assert [found.failures for found in plan.survival] == [1, 2]
    assert plan.survival[0].without_loss.probability == pytest.approx(1.0)
    assert plan.survival[1].without_loss.probability < 1.0
    assert plan.summary.startswith("every unit survives 1 loss with no step lost; 1.0 kB a step")


def test_what_does_not_fit_is_older_and_says_why():
    plan = choose([CopyUnit(4000, 4000, [0], 100.0)], budget=0.0)
    (unit,) = plan.units
    assert (unit.kind, unit.period, unit.most_lost_steps, unit.reason) == ("snapshot", 4, 3, "no_time")
    # node 0 fails in a step: 1.5 steps on average, or 499.5 if its holder fails too
    assert plan.lost_tokens == pytest.approx(1e-3 * 100 * (0.999 * 1.5 + 1e-3 * 499.5))
    assert plan.summary.endswith(
        "1 of 1 units has a snapshot every 4 steps because windows and budget of node 0 are used up"
    )
    late = choose([CopyUnit(4000, 4000, [0], 100.0)], budget=0.35)
    assert late.units[0].period == 1
    assert late.delay_seconds == pytest.approx(0.3)
    assert "a step takes 30.00 % longer" in late.summary


def test_a_thousand_experts_on_many_nodes():
    units = [CopyUnit(14_000, 2000 * (expert % 5), [expert % 64], float(expert % 5)) for expert in range(1024)]
    nodes = [CopyNode(1e-5, node // 4, 1 << 22, 0, 100.0, 100.0) for node in range(64)]
    plan = choose(units, nodes, replication=3)
    assert all(unit.covered for unit in plan.units)
    for choice in plan.units:
        domains = {nodes[node].domain for node in (choice.primary, *(holder.node for holder in choice.holders))}
        assert len(domains) == 3
    received = [node.received_bytes for node in plan.nodes]
    assert max(received) <= 1.5 * sum(received) / len(received)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: choose([CopyUnit(1, 1, [4], 1)]), r"units: unit 0 is active on node 4; there are 4 nodes"),
        (lambda: choose([CopyUnit(-1, 1, [0], 1)]), r"units\[0\].state_bytes: expected an integer"),
        (lambda: choose([CopyUnit(1, 1, 0, 1)]), r"units\[0\].active: expected a list"),  # type: ignore[arg-type]
        (lambda: choose([CopyUnit(1, 1, [0], "x")]), r"units\[0\].tokens: expected a number"),  # type: ignore[arg-type]
        (lambda: choose([], [CopyNode(2.0, 0, 0)]), r"nodes: failure of node 0: expected a probability"),
        (lambda: choose([], replication=0), r"replication: expected 1|copies: expected 1"),
        (lambda: choose([], budget=1.5), r"budget: expected a share"),
        (lambda: choose([], max_period=5000), r"max_period: expected 1 to 4096"),
    ],
)
def test_errors_name_their_argument(call, message):
    with pytest.raises(ValueError, match=message):
        call()
