"""MoEtion's placement of copies: Algorithm 2 as printed, and as its text describes it."""

from __future__ import annotations

from time import perf_counter

from benches.papers.figure import Row, stated
from evermoe.planning.holders import TrainingCopies, training_copy_holders


def cluster_holders() -> TrainingCopies:
    """Return the holders for 64 GPUs on 16 nodes, 8 stages and 8 data-parallel peers, ZeRO stage 1."""
    names, ranks = [f"node{rank // 4:02}" for rank in range(64)], range(64)
    return training_copy_holders(names, [rank // 8 for rank in ranks], [rank % 8 for rank in ranks], 2, zero_stage=1)


def as_printed(data: int, stages: int, copies: int) -> list[list[int]]:
    """Return the holders of each worker's copies by Algorithm 2 as printed."""
    workers = data * stages
    counts, found = [0] * workers, []
    for worker in range(workers):
        group = [worker % data + data * stage for stage in range(stages)]
        chosen = [peer for peer in group if peer != worker][: min(copies, data - 1)]
        for peer in chosen:
            counts[peer] += 1
        for peer in range(workers):
            if len(chosen) < copies and peer not in group and counts[peer] < copies:
                chosen.append(peer)
                counts[peer] += 1
        found.append(chosen)
    return found


def algorithm_2() -> list[Row]:
    """Return the rows of Algorithm 2 as printed, next to the promise of its text, which has no numbers."""
    rows = []
    for data, stages, copies in ((2, 3, 3), (1, 4, 1)):
        workers = data * stages
        setting = f"{data} data-parallel peer{'s' * (data > 1)}, {stages} stages, r = {copies}"
        printed = as_printed(data, stages, copies)
        for name, lists, why in (
            (
                "as printed",
                printed,
                "Theorem 1 promises r copies for all workers. The algorithm takes min(r, DP - 1) holders of a worker's "
                "group, and of all others at most r copies each",
            ),
            (
                "evermoe",
                _mended(data, stages, copies),
                "`training_copy_holders`, for state that no peer has (ZeRO stage 3)",
            ),
        ):
            rows.append(
                Row(
                    quantity=f"workers with at least r copies elsewhere, {name}: {setting}",
                    unit=f"of {workers}",
                    paper=None,
                    ours=sum(len(set(held)) >= copies for held in lists),
                    how="exact",
                    why=why,
                )
            )
    data, stages = 2, 3
    first = [held[0] // data == worker // data for worker, held in enumerate(as_printed(data, stages, 1))]
    rows.append(
        Row(
            quantity="workers whose copy is on a data-parallel peer, as printed: 2 peers, 3 stages, r = 1",
            unit=f"of {data * stages}",
            paper=None,
            ours=sum(first),
            how="exact",
            why="its group[i] = {i mod DP + DP · m} is the pipeline of worker i, not its data-parallel group",
        )
    )
    return rows


def _mended(data: int, stages: int, copies: int) -> list[list[int]]:
    """Return the holders of each worker's copies by the algorithm's text, each worker on its own node."""
    workers = range(data * stages)
    names = [f"node{rank:02}" for rank in workers]
    peers, stage = [rank % data for rank in workers], [rank // data for rank in workers]
    return [held[1:] for held in training_copy_holders(names, peers, stage, copies + 1, zero_stage=3).optimizer]


def placement_time() -> list[Row]:
    """Return the row of the placement's time for the paper's cluster."""
    began = perf_counter()
    cluster_holders()
    return [
        Row(
            quantity="placement of copies for 64 GPUs",
            unit="s",
            paper=stated("section 5.1", 3.2),
            ours=perf_counter() - began,
            how="real run",
            why="`training_copy_holders`, on the machine that runs this",
        )
    ]
