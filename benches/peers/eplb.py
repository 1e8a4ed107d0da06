"""DeepSeek's EPLB, global (one group, one node), and SGLang's form of it without loops over layers.

Written from the published algorithms. Both take a load [L, E] and return the replicas [L, N, E]. Both assign replicas
greedily: one to each expert, then one more to the expert with the most load per replica. They differ in how they pack
replicas on nodes, and neither keeps two replicas of an expert on different nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def eplb(load_LE: Tensor, nodes: int, slots: int, in_tensors: bool = False) -> Tensor:
    """Assign replicas by descending load, each to the least loaded node with a free slot.

    The published code loops over elements of tensors, as `in_tensors` does. With Python numbers the result is the same
    except for rounding, about 30 times as fast.
    """
    expert_LS, count_LE = replicate(load_LE, nodes * slots)
    weight_LS = (load_LE / count_LE).gather(1, expert_LS)
    order_LS = weight_LS.argsort(dim=1, descending=True, stable=True)
    node_LS = torch.empty_like(order_LS)
    rows = (order_LS, weight_LS) if in_tensors else (order_LS.tolist(), weight_LS.tolist())
    for layer, (order, weights) in enumerate(zip(*rows, strict=True)):
        node_LS[layer] = torch.tensor(pack(order, weights, nodes, slots))
    return matrices(expert_LS, node_LS, nodes, load_LE.shape[1])


def pack(order: Tensor | list[int], weights: Tensor | list[float], nodes: int, slots: int) -> list[int]:
    """Return the node of each replica."""
    loads, room, node_of = [0] * nodes, [slots] * nodes, [0] * len(order)
    open_nodes = list(range(nodes))
    for replica in order:
        node = min(open_nodes, key=loads.__getitem__)
        node_of[replica] = node
        loads[node] += weights[replica]
        room[node] -= 1
        if room[node] == 0:
            open_nodes.remove(node)
    return node_of


def snake(load_LE: Tensor, nodes: int, slots: int) -> Tensor:
    """Assign replicas by descending load to the nodes in turn, every other round in reverse."""
    expert_LS, count_LE = replicate(load_LE, nodes * slots)
    weight_LS = (load_LE / count_LE).gather(1, expert_LS)
    order_LS = weight_LS.argsort(dim=1, descending=True)
    turns = torch.arange(nodes).repeat(slots, 1)
    turns[1::2] = turns[1::2].flip(1)
    return matrices(expert_LS.gather(1, order_LS), turns.flatten().expand_as(order_LS), nodes, load_LE.shape[1])


def replicate(load_LE: Tensor, places: int) -> tuple[Tensor, Tensor]:
    """Return the expert of each of `places` replicas [L, S], and the number of replicas of each expert [L, E]."""
    layers, experts = load_LE.shape
    expert_LS = torch.arange(places).repeat(layers, 1)
    count_LE = torch.ones_like(load_LE)
    every = torch.arange(layers)
    for place in range(experts, places):
        most_L = (load_LE / count_LE).argmax(1)
        expert_LS[:, place] = most_L
        count_LE[every, most_L] += 1
    return expert_LS, count_LE


def matrices(expert_LS: Tensor, node_LS: Tensor, nodes: int, experts: int) -> Tensor:
    """Return the number of replicas of each expert on each node, [L, N, E]."""
    layers = expert_LS.shape[0]
    flat = torch.zeros(layers, nodes * experts, dtype=torch.int64)
    flat.scatter_add_(1, node_LS * experts + expert_LS, torch.ones_like(expert_LS))
    return flat.view(layers, nodes, experts)
