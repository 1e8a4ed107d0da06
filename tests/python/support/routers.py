"""Choices of routers, by plain loops."""

from __future__ import annotations

from collections.abc import Sequence

from evermoe import Router


def best_ids(router: Router, scores: Sequence[float]) -> list[int]:
    """The experts of one token, best first: of the best groups, by their scores and the router's numbers."""
    rank = [score + (0 if router.balance is None else router.balance[e].item()) for e, score in enumerate(scores)]
    size = len(rank) // router.groups
    groups = [range(g * size, g * size + size) for g in range(router.groups)]
    best = 2 if router.scores == "sigmoid" else 1
    groups.sort(key=lambda group: -sum(sorted((rank[e] for e in group), reverse=True)[:best]))
    allowed = [e for group in groups[: router.top_groups] for e in group]
    ids = sorted(allowed, key=lambda e: -rank[e])[: router.top_k]
    assert len({e // size for e in ids}) <= router.top_groups
    return ids
