"""BAFT: copies to the previous stage's node in the bubbles of a pipeline."""

from __future__ import annotations

from itertools import combinations
from typing import NamedTuple

from benches.papers.figure import Figure, Row, stated
from evermoe.planning.schedule import (
    ALPHA_SECONDS,
    ChunkPolicy,
    ChunkReason,
    CopyItem,
    Link,
    Memory,
    Receiver,
    plan_chunks,
)
from evermoe.planning.windows import Span, StepProfile, Windows, find_windows

NETWORK = 10e9 / 8
"""Bytes per second between two servers (section 5.2)."""
LINK, BUFFERS = Link(ALPHA_SECONDS, NETWORK), Memory(1 << 28, 4)
SERVERS = 4
WEIGHT_BYTES = 4
SHORTEST, LONGEST = 0.6, 5.5 / 3
"""Seconds of a step, which our copy does not state: 1 to 3 of them take 0.6 to 5.5 s (section 5.4)."""
MEASURED_BUBBLES = 0.2
"""Least share of bubbles in a step (section 3.2; Figure 3)."""


class Layout(NamedTuple):
    """Sizes of the parallel groups, and samples of a step and of a micro-batch (Table 1)."""

    data: int
    tensor: int
    pipeline: int
    batch: int
    micro_batch: int

    @property
    def bubbles(self) -> float:
        """Share of a step that a stage of 1F1B waits at its start and end: (p - 1) / (m + p - 1), m micro-batches."""
        micro_batches = self.batch // self.data // self.micro_batch
        return (self.pipeline - 1) / (micro_batches + self.pipeline - 1)


LAYOUTS = tuple(
    Layout(*sizes, batch, 8) for batch in (128, 64) for sizes in ((2, 2, 4), (4, 1, 4), (1, 4, 4), (2, 1, 8), (1, 2, 8))
)
"""Table 1; its d4m1d4 and d1m4d4 can only be d4m1p4 and d1m4p4, as the product is 16 GPUs."""


class Model(NamedTuple):
    """A server's part of a model: a quarter of its layers, in all layouts."""

    name: str
    parameters: float
    layers: int
    step: float

    @property
    def items(self) -> list[CopyItem]:
        """Layers of the server, each sent to the previous server."""
        nbytes = round(self.parameters * WEIGHT_BYTES / self.layers)
        return [CopyItem(f"layer {number}", nbytes, [1]) for number in range(self.layers // SERVERS)]


BERT_LARGE = Model("Bert-Large", 340e6, 24, SHORTEST)
GPT_2 = Model("GPT-2", 1.5e9, 48, LONGEST)
SIZES = (
    "The models' sizes are not in our copy: 340 million parameters in 24 layers, 1.5 billion in 48, from their own "
    "papers; fp32 weights, as BAFT copies weights alone"
)


def windows(step: float, bubbles: float) -> Windows:
    """Return the windows of a network that is idle in the bubbles at a step's start and end."""
    busy = Span("pipeline", "collective", "network", step * bubbles / 2, step * (1 - bubbles))
    return find_windows([StepProfile(step, [busy])], gamma=1.0)


def plan(model: Model, bubbles: float, policy: ChunkPolicy) -> ChunkReason:
    """Plan the copies of a server's part; the previous server is as idle as this one."""
    both = windows(model.step, bubbles)
    return plan_chunks(model.items, both, LINK, BUFFERS, policy=policy, receivers=[Receiver(1, both)]).reason


def _measured(layout: Layout) -> float:
    return max(layout.bubbles, MEASURED_BUBBLES)


def _figure_3() -> list[Row]:
    return [
        Row(
            quantity="bubbles of a step, least over the configurations of Table 1",
            unit="%",
            paper=stated("section 3.2; Figure 3", at_least=20),
            ours=100 * min(layout.bubbles for layout in LAYOUTS),
            how="exact",
            why="(p - 1) / (m + p - 1) of 1F1B counts the pipeline's start and end alone; the paper measures all "
            "waiting, of which d1m4p4 has the most for its tensor-parallel groups",
        ),
        Row(
            quantity="the same, most",
            unit="%",
            paper=None,
            ours=100 * max(layout.bubbles for layout in LAYOUTS),
            how="exact",
            why="drawn in Figure 3 without a number in our copy",
        ),
    ]


def _figure_7() -> list[Row]:
    alone = plan_chunks(BERT_LARGE.items, windows(SHORTEST, 0.0), LINK, BUFFERS, policy="gemini").reason
    return [
        *(
            Row(
                quantity="a step made longer by copies, worst configuration",
                unit="%",
                paper=paper,
                ours=None,
                how="not computed",
                why="the paper measures, including the cost of switching. `plan_chunks` takes as many steps as the "
                f"bubbles need, so that its plans delay nothing. {why}",
            )
            for paper, why in (
                (stated("section 5.3; Figure 7", at_most=2), "Section 7 states another number"),
                (stated("section 7", at_most=1), "Section 5.3 states another number"),
            )
        ),
        Row(
            quantity="a step of Bert-Large made longer by a copy that uses no bubbles, as FTPipeHD's",
            unit="%",
            paper=stated("section 6", 50),
            ours=100 * alone.delay_seconds / SHORTEST,
            how="planner",
            why="nearly 50, says the paper; a quarter of the weights over 10 Gbps, of an assumed step of 0.6 s. "
            f"{SIZES}",
        ),
    ]


def _hits() -> list[Row]:
    rows = []
    for model in (BERT_LARGE, GPT_2):
        steps = [plan(model, _measured(layout), "auto").steps_per_version for layout in LAYOUTS]
        for name, value in (("fewest", min(steps)), ("most", max(steps))):
            rows.append(
                Row(
                    quantity=f"steps of {model.name} whose bubbles a checkpoint takes, {name} over the configurations",
                    unit="",
                    paper=stated("section 5.4", at_least=1, at_most=3),
                    ours=value,
                    how="planner",
                    why=f"`plan_chunks`. {SIZES}. Bubbles by 1F1B, but at least 20 %; steps of {model.step:.2g} s, "
                    "assumed from the 0.6 to 5.5 s that 1 to 3 steps take",
                )
            )
    rows.append(
        Row(
            quantity="training time lost by a failure",
            unit="s",
            paper=stated("section 5.4", at_least=0.6, at_most=5.5),
            ours=None,
            how="not computed",
            why="our copy does not state a step's time; the rows above assume it from this range",
        )
    )
    return rows


def _figure_8() -> list[Row]:
    return [
        Row(
            quantity=f"time to send a server's part of {model.name} back to it",
            unit="s",
            paper=None,
            ours=sum(item.bytes for item in model.items) / NETWORK,
            how="arithmetic",
            why="bytes over 10 Gbps. Several seconds with loading, says the paper, without a number in our copy. "
            f"{SIZES}",
        )
        for model in (BERT_LARGE, GPT_2)
    ]


def complete_layers(sizes: list[int], capacity: int) -> int:
    """Return the most bytes of complete layers that fit into a bubble (Algorithm 2), by trying every choice."""
    choices = (chosen for number in range(len(sizes) + 1) for chosen in combinations(sizes, number))
    return max(total for total in map(sum, choices) if total <= capacity)


def _algorithm_2() -> list[Row]:
    layer, bubble, step = 125_000_000, 0.05, 1.0
    both = windows(step, 2 * bubble)
    found = plan_chunks(
        [CopyItem("layer", layer, [1])],
        both,
        LINK,
        BUFFERS,
        policy="auto",
        receivers=[Receiver(1, both)],
    ).reason
    setting = "a layer of 125 MB at 10 Gbps, which takes 100 ms, in bubbles of 50 ms"
    return [
        Row(
            quantity=f"bytes that a step's bubbles carry of {setting}, complete layers by Algorithm 2",
            unit="MB",
            paper=None,
            ours=2 * complete_layers([layer], round(bubble * NETWORK)) / 1e6,
            how="exact",
            why="the knapsack takes complete layers, so that this one is never sent, and no checkpoint ever complete",
        ),
        Row(
            quantity=f"steps until {setting}, is sent by evermoe",
            unit="",
            paper=None,
            ours=found.steps_per_version,
            how="planner",
            why="a layer that no window can take is cut",
        ),
    ]


FIGURES = (
    Figure(id="baft-f3", title="Figure 3: bubbles of a pipeline", rows=_figure_3),
    Figure(
        id="baft-f4",
        title="Figure 4: bubbles of Chimera on 2,048 GPUs",
        note="Not stated in our copy: its numbers are in the picture, and are another paper's.",
    ),
    Figure(
        id="baft-algorithm2",
        title="Algorithm 2: complete layers for each bubble",
        rows=_algorithm_2,
        is_error=True,
    ),
    Figure(id="baft-f7", title="Figure 7: overhead of copies", rows=_figure_7),
    Figure(id="baft-s54", title="Section 5.4: steps of a checkpoint, and what a failure loses", rows=_hits),
    Figure(id="baft-f8", title="Figure 8: time to reload a checkpoint", rows=_figure_8),
)
"""All figures of BAFT, in the paper's order."""
