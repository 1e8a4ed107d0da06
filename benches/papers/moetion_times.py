"""MoEtion: sizes of its models, times of checkpoints, wasted work, and what each technique contributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from benches.papers.figure import Row, stated
from benches.papers.moetion_placement import cluster_holders
from benches.papers.sizes import ModelSize, checkpoint_bytes

WEIGHT_BYTES, OPTIMIZER_BYTES, GRADIENT_BYTES = 2, 8, 2
"""Bytes per parameter (section 2.3); gradients are as wide as weights."""
NODES, NODE_NETWORK, STORAGE = 16, 320e9 / 8, 40e9 / 8
"""Nodes of 4 GPUs; bytes per second of a node's interconnect, and of all nodes to Blob Storage (section 7.1)."""


def from_totals(dense: float, sparse: float, experts: int) -> ModelSize:
    """Return the parameters inside and outside experts, from totals of the dense and the sparse model.

    The sparse one has E feed-forwards where the dense one has 1 (section 7.1): D + F and D + E * F. All layers count as
    one, as their sizes are equal.

    Args:
        dense: parameters of the dense model, D + F.
        sparse: parameters of the sparse model, D + E * F.
        experts: E.
    """
    expert = (sparse - dense) / (experts - 1)
    return ModelSize(
        non_expert_parameters=round(dense - expert),
        layers=1,
        experts=experts,
        expert_parameters=round(expert),
        weight_bytes=WEIGHT_BYTES,
        optimizer_bytes=OPTIMIZER_BYTES,
        gradient_bytes=GRADIENT_BYTES,
    )


SMALL, MIDDLE = from_totals(1.6e9, 58.7e9, 64), from_totals(2.9e9, 30.1e9, 16)


def small_bytes(what: Literal["full", "moetion", "gradients"]) -> int:
    """Return the bytes of a checkpoint of MoE-GPT-1.6B-64E: full, with 6 of its 64 experts, or of its gradients."""
    return checkpoint_bytes(SMALL, what, **({"selected": 6} if what == "moetion" else {})).total_bytes


def figure_5() -> list[Row]:
    """Return the rows of times of checkpoints."""
    full = small_bytes("full")
    return [
        Row(
            quantity="stall of CheckFreq, MoE-GPT-1.6B-64E at each step",
            unit="s",
            paper=stated("section 7.2; Figure 5", 100),
            ours=full / STORAGE,
            how="arithmetic",
            why="the checkpoint over 40 Gbps; nearly 100, says the paper, of all models together",
        ),
        Row(
            quantity="time of Gemini's copies, MoE-GPT-1.6B-64E at each step",
            unit="s",
            paper=stated("section 7.2; Figure 5", 28),
            ours=full / NODES / NODE_NETWORK,
            how="arithmetic",
            why="each of 16 nodes sends its part at 320 Gbps (section 7.1). The paper's 28 s, and its 74.9 s for "
            f"1820 GB (Figure 9b), are {1820 / 74.9:.0f} GB/s in all 16 nodes, a 26th of that",
        ),
    ]


def figure_6() -> list[Row]:
    """Return the rows of the frequency of checkpoints."""
    return [
        Row(
            quantity=f"checkpoints of MoEtion for each of {name}, {number} in 100 steps",
            unit="×",
            paper=stated("section 7.2; Figure 6", at_least=least),
            ours=100 / number,
            how="arithmetic",
            why=f"the paper's own numbers; it says more than {least}",
        )
        for name, number, least in (("Gemini", 6, 15), ("CheckFreq", 2, 50))
    ]


def figure_7() -> list[Row]:
    """Return the rows of wasted work."""
    checkpoint = small_bytes("full") / STORAGE
    step = 100 / 4
    return [
        Row(
            quantity="wasted work of Gemini over MoEtion, the largest of all models",
            unit="×",
            paper=stated("section 9", 12),
            ours=None,
            how="not computed",
            why=f"up to 12, says the paper. Of three models our copy has Gemini's times of one alone, MoE-GPT-3.8B-8E: "
            f"27.4 s at each step and 25.7 s without stalls, {27.4 / 14.9:.2f} and {25.7 / 14.9:.2f} times the 14.9 s "
            "of MoEtion",
        ),
        Row(
            quantity="wasted time of CheckFreq, MoE-GPT-1.6B-64E",
            unit="s",
            paper=stated("section 7.2; Figure 7", 331.9),
            ours=2 * checkpoint + 25 * step,
            how="arithmetic",
            why="the paper's formula with its own numbers: checkpoint and retrieval at 40 Gbps, half of the 50 steps "
            "between checkpoints, and steps of 25 s, as a stall of 100 s makes training 5 times slower. The two do "
            f"not agree: 331.9 s would be steps of {(331.9 - 2 * checkpoint) / 25:.1f} s",
        ),
        *(
            Row(
                quantity=f"wasted time of {system}, {model}",
                unit="s",
                paper=stated("section 7.2; Figure 7", seconds),
                ours=None,
                how="not computed",
                why="the formula needs the time of a step and of a retrieval, which our copy does not state for these",
            )
            for system, model, seconds in (
                ("Gemini-HighFreq", "MoE-GPT-3.8B-8E", 27.4),
                ("Gemini-No-Stall", "MoE-GPT-3.8B-8E", 25.7),
                ("MoEtion", "MoE-GPT-1.6B-64E", 11.9),
                ("MoEtion", "MoE-GPT-2.9B-16E", 9.8),
                ("MoEtion", "MoE-GPT-3.8B-8E", 14.9),
            )
        ),
    ]


def figure_9() -> list[Row]:
    """Return the rows of checkpoints by the number of experts."""
    return [
        Row(
            quantity="checkpoint of Gemini over that of MoEtion, 32 experts",
            unit="×",
            paper=stated("section 7.4; Figure 9a", at_least=9),
            ours=1820 / 195,
            how="arithmetic",
            why="the paper's own sizes",
        ),
        Row(
            quantity="time of MoEtion's checkpoint, 32 experts",
            unit="s",
            paper=stated("section 7.4; Figure 9b", 8.5),
            ours=195 / (1820 / 74.9),
            how="arithmetic",
            why="195 GB as fast as Gemini's 1820 GB in 74.9 s",
        ),
    ]


def redundancy() -> list[Row]:
    """Return the rows of what a checkpoint need not send, as data-parallel peers have it."""
    stages, found = [rank % 8 for rank in range(64)], cluster_holders()
    free = float(np.mean([_is_peer(holders, stages) for holders in found.parameters]))
    parts = {
        "MoE-GPT-1.6B-64E, 6 experts": checkpoint_bytes(SMALL, "moetion", selected=6),
        "MoE-GPT-2.9B-16E, 4 experts": checkpoint_bytes(MIDDLE, "moetion", selected=4),
    }
    return [
        *(
            Row(
                quantity=f"part of a checkpoint that is no expert's, without ZeRO, {name}",
                unit="%",
                paper=stated("section 5.1", 40),
                ours=100 * (1 - part.expert_bytes / part.total_bytes),
                how="arithmetic",
                why="up to 40 % smaller, says the paper, as peers have all that is no expert's. From the parameters of "
                "section 7.1, 10 bytes each; those of the third model do not agree (moetion-models)",
            )
            for name, part in parts.items()
        ),
        Row(
            quantity="copies that data-parallel peers have anyway, ZeRO stage 1, 8 stages and 8 peers, 64 GPUs",
            unit="% of bytes",
            paper=None,
            ours=100 * free * WEIGHT_BYTES / (WEIGHT_BYTES + OPTIMIZER_BYTES),
            how="planner",
            why="`training_copy_holders`: peers on other nodes have all parameters, 2 of 10 bytes, and no optimizer "
            "state. The paper states times (moetion-f10), and no share of bytes for ZeRO",
        ),
    ]


def _is_peer(holders: Sequence[int], stages: Sequence[int]) -> bool:
    """Return whether all holders belong to one stage, so that nothing is sent."""
    return len({stages[rank] for rank in holders}) == 1


def figure_10() -> list[Row]:
    """Return the rows of what each technique contributes to the time of a checkpoint."""
    selective, place = small_bytes("moetion"), "section 7.5; Figure 10"
    return [
        Row(
            quantity="time of a selective checkpoint, MoE-GPT-1.6B-64E",
            unit="s",
            paper=stated(place, 5.7),
            ours=selective / NODES / NODE_NETWORK,
            how="arithmetic",
            why="61 GB, of which each of 16 nodes sends its part at 320 Gbps (section 7.1)",
        ),
        *(
            Row(
                quantity=f"time of a selective checkpoint over that of all techniques, {model}",
                unit="×",
                paper=stated("section 5", at_least=2, at_most=3),
                ours=first / last,
                how="arithmetic",
                why=f"Figure 10's {first} and {last} s; a further 2 to 3, says the text",
            )
            for model, first, last in (
                ("MoE-GPT-1.6B-64E", 5.7, 2.7),
                ("MoE-GPT-2.9B-16E", 3.6, 1.5),
                ("MoE-GPT-3.8B-8E", 12.6, 3.9),
            )
        ),
        Row(
            quantity="reduction of the time by bubbles, the largest of all models",
            unit="%",
            paper=stated(place, 30),
            ours=None,
            how="not computed",
            why="up to 30, says the paper. Our copy has both times of one model alone, MoE-GPT-3.8B-8E: 12.6 and 10.9 "
            f"s, which are {100 * (1 - 10.9 / 12.6):.1f} %",
        ),
        Row(
            quantity="reduction of the time by placement on data-parallel peers, MoE-GPT-3.8B-8E",
            unit="%",
            paper=stated(place, 20),
            ours=100 * (1 - 7.0 / 10.9),
            how="arithmetic",
            why="the figure's own numbers, 10.9 and 7.0 s; an additional 20 % of checkpoint times, says the text",
        ),
        Row(
            quantity="reduction of the time by repeating the optimizer's step, MoE-GPT-3.8B-8E",
            unit="%",
            paper=stated(place, 40),
            ours=100 * (1 - 3.9 / 7.0),
            how="arithmetic",
            why="the figure's own numbers, 7.0 and 3.9 s; the text says about 40",
        ),
        Row(
            quantity="bytes of a state over those of its gradients",
            unit="×",
            paper=stated("section 5.2", 5),
            ours=small_bytes("full") / small_bytes("gradients"),
            how="arithmetic",
            why="10 bytes a parameter (section 2.3), and gradients assumed as wide as weights, 2 bytes; evermoe's "
            "fp32 state is 12 bytes, its gradients 2 to 4",
        ),
    ]
