"""The planners as functions: replicas by load, placement, survival, protection of experts, and schedule of copies.

    python examples/08_plan_api.py

Planners compute with plain numbers, without processes, network or model. The same input gives the same plan on every
rank. `evermoe plan` on the command line uses these functions.
"""

from evermoe import planning
from evermoe.planning.dispatch import imbalance
from evermoe.planning.placement import POLICIES
from evermoe.planning.schedule import CopyItem, Link, Memory, plan_chunks
from evermoe.planning.windows import Span, StepProfile, find_windows

NODES, SLOTS, EXPERTS = 6, 5, 12


def place_experts():
    """Place experts on nodes by their load. Return the load."""
    load = [1000 / (rank + 1) for rank in range(EXPERTS)]  # expert 0 gets 12 times the tokens of expert 11
    replicas = planning.allocate(load, NODES, SLOTS, min_replicas=2)
    print("replicas by load:", replicas.tolist())
    for policy in POLICIES:
        placed = planning.place(replicas, NODES, SLOTS, policy, load)
        survival = [float(planning.recovery_probability(placed.matrix, failures)) for failures in (1, 2)]
        even = imbalance(placed.matrix, load, policy="balanced")
        print(
            f"  {policy:9} busiest node {even:.2f} x the mean; survives 1 loss {survival[0]:.0%}, 2 {survival[1]:.0%}"
        )
    return load


def protect(load):
    """Plan how each expert is protected if cold experts have a single replica. Return the network link."""
    replicas = planning.allocate(load, NODES, SLOTS - 1, min_replicas=1)
    placed = planning.place(replicas, NODES, SLOTS - 1, "balanced", load)
    units = [
        planning.CopyUnit(
            state_bytes=12_000_000, gradient_bytes=4_000_000, active=holders(placed.matrix, expert), tokens=load[expert]
        )
        for expert in range(EXPERTS)
    ]
    nodes = [
        planning.CopyNode(1e-4, domain, 1 << 30, network_seconds=0.05, host_link_seconds=0.5) for domain in range(NODES)
    ]
    link = Link(50e-6, 1e9)
    plan = planning.choose_copies(units, nodes, network=link, host_link=Link(10e-6, 1e10), step_seconds=0.5)
    print("copies:", plan.summary)
    for expert in (0, EXPERTS - 1):
        choice = plan.units[expert]
        print(f"  expert {expert}: {choice.kind}, {choice.bytes / 1e6:.0f} MB a step: {choice.summary}")
    return link


def holders(matrix, expert):
    """Return the nodes that train an expert."""
    return [node for node, row in enumerate(matrix) if row[expert]]


def schedule(link):
    """Schedule 400 MB of copies in the idle windows of a step of 0.5 s."""
    spans = [Span("all to all", "collective", "network", start, 0.05, 1 << 20, [1]) for start in (0.0, 0.15, 0.35)]
    windows = find_windows([StepProfile(0.5, spans)] * 20)
    for policy in ("gemini", "moetion", "auto"):
        plan = plan_chunks([CopyItem("expert", 400_000_000, [1])], windows, link, Memory(64 << 20, 8), policy=policy)
        print(f"  {policy:6} {plan.reason}")


def main():
    """Run the three planners."""
    load = place_experts()
    link = protect(load)
    print("chunks of a snapshot of 400 MB:")
    schedule(link)


if __name__ == "__main__":
    main()
