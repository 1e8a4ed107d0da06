"""Lazarus against restarts from checkpoints: consecutive losses, and spot nodes, simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean

from benches.papers.figure import Row, Stated, quotient, stated
from benches.papers.routing import skewed_load
from evermoe.simulate import Constants, Failure, Outcome, Scenario, SchemeName, Workload, simulate
from evermoe.simulate.scenario import DAY, SimulatedOptions

NODES, SLOTS, LEAST = 10, 6, 2
"""GPUs that count as nodes, slots per node, and least replicas of every expert (section 6.1)."""
LAYERS = 12
TOKENS = NODES * 4 * 1024
"""Tokens of a global batch: 4 sequences of 1024 tokens on each GPU (section 6.1)."""
STORE = 10e9 / 8
"""Bytes per second of the NFS server, for all nodes together (section 6.1)."""
NETWORK = 100e9 / 8 / 2
"""Bytes per second of each node: two share a server's 100 Gbit/s (section 6.1)."""
RECONFIGURATION = 30.0
"""Seconds of a reconfiguration: 20 to 40 (section 6.3)."""
EARLY, LATE, SETTLED = 3.0, 0.5, 4000
"""Skew of the load at the first step and from step 4000 on, as in Figure 8's rows; linear in between."""
LOSSES = (3, 7, 1, 8, 5)
"""Nodes that fail, one after another; the paper chooses them at random, equal for all systems (section 6.2)."""
LEAVING = (0, 3, 6, 9)
"""The 4 of 10 nodes that are lost at minute 34 (section 6.4)."""
SCHEMES: Mapping[str, SchemeName] = {"Lazarus": "lazarus", "DS": "restart", "DS(FT)": "restart-groups"}
"""Systems of the paper's comparison, by its names."""

Found = Mapping[str, Sequence[Outcome]]
"""Outcomes for the load of each layer, by the paper's name of a system."""


@dataclass(frozen=True)
class Trained:
    """Model of Table 1, trained as in the paper."""

    name: str
    model: str
    expert_parallel: int
    """Nodes of a group in DS and DS(FT) (section 6.1)."""
    step_seconds: float


SMALL = Trained("GPT-S", "gpt-s-moe", 2, (1800 - len(LOSSES) * RECONFIGURATION) / 2926)
MIDDLE = Trained("GPT-M", "gpt-m-moe", 2, NODES * 4 / 45)
LARGE = Trained("GPT-L", "gpt-l-moe", 4, (1800 - len(LOSSES) * RECONFIGURATION) / 1996)
"""Seconds of a step: from the steps in 30 minutes with five losses (section 6.2; Figure 6), and from 45 samples per
second on 10 nodes (section 6.2; Figure 7)."""

SETTING = (
    "the same losses for all three; a step as long as the paper's (30 min less five reconfigurations of 30 s, over its "
    "2926 and 1996 steps), half of it in experts; 15 s until a loss is known and 10 s to connect, of the paper's 10 to "
    "20 and 5 to 15; assumed: training waits for DS's checkpoints as they go through 10 Gbit/s, and processes start in "
    "60 s; the mean over 12 log-normal loads, ever more even until step 4000. The paper gives no "
    "seconds of restarts and saves; longer ones would raise the ratios to DS"
)


def _constants(scheme: SchemeName) -> Constants:
    """Return the default constants, which have Lazarus' detection and connection times, with the paper's network and
    store.

    DeepSpeed's checkpoints block training until they are stored, with a tenth of the store's rate for each node.
    evermoe's are written in the background.
    """
    found = Constants(
        network_bytes_per_second=NETWORK,
        store_write_bytes_per_second=STORE,
        store_read_bytes_per_second=STORE,
        store_bytes_per_second=STORE,
    )
    return found if scheme == "lazarus" else replace(found, capture_bytes_per_second=STORE / NODES)


def _loads(experts: int, layer: int) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Return the shares of a layer's experts, every 500 steps until the load has settled."""
    skews = [(step, EARLY + (LATE - EARLY) * step / SETTLED) for step in range(0, SETTLED + 1, 500)]
    return tuple((step, tuple(map(float, skewed_load(LAYERS, experts, skew)[layer]))) for step, skew in skews)


def _started() -> float:
    """Return the seconds before the first step, which the paper's figures exclude."""
    return Constants().start_seconds + Constants().rebuild_seconds


def one_by_one(minutes: float) -> Failure:
    """Return losses of nodes for good at regular minutes of training, until half of them remain (section 6.2)."""
    lost = [(_started() + 60 * minutes * number, False, [node]) for number, node in enumerate(LOSSES, 1)]
    return Failure.at_times([(0.0, True, range(NODES)), *lost])


def spot() -> tuple[Failure, ...]:
    """Return failures that represent the trace of section 6.4: its loss of 4 nodes, and single losses; all return."""
    at = _started() + 34 * 60
    at_once = Failure.at_times([(0.0, True, range(NODES)), (at, False, LEAVING), (at + 600, True, LEAVING)])
    return at_once, Failure.poisson(mtbf_seconds=300, repair_seconds=600)


def outcomes(of: Trained, minutes: float, every: Sequence[int], failures: Sequence[Failure]) -> Found:
    """Simulate all systems on the paper's cluster.

    Args:
        of: the trained model.
        minutes: minutes of training, after the first start.
        every: steps between checkpoints of Lazarus, DS and DS(FT); 0 disables those of Lazarus.
        failures: the failures; random ones differ by layer, and are equal for all systems.
    """
    workload = Workload.preset(of.model, step_seconds=of.step_seconds, tokens_per_step=TOKENS)

    def simulated(scheme: SchemeName, steps: int, layer: int) -> Outcome:
        is_lazarus = scheme == "lazarus"
        scenario = Scenario(
            workload,
            nodes=NODES,
            days=(_started() + 60 * minutes) / DAY,
            failures=tuple(failures),
            constants=_constants(scheme),
            options=SimulatedOptions(
                expert_slots=SLOTS,
                min_replicas=LEAST,
                rebalance_interval=200,
                checkpoint_interval=steps if is_lazarus else 0,
            ),
            load_trace=_loads(workload.experts, layer),
            expert_parallel=None if is_lazarus else of.expert_parallel,
            restart_interval=50 if is_lazarus else steps,
        )
        return simulate(scenario, scheme, seed=layer)

    return {
        name: [simulated(scheme, steps, layer) for layer in range(LAYERS)]
        for (name, scheme), steps in zip(SCHEMES.items(), every, strict=True)
    }


def _rate(found: Sequence[Outcome]) -> float:
    """Return tokens per second, mean over the layers' loads."""
    return fmean(each.goodput_tokens_per_second for each in found)


def _over(of: Trained, other: str, found: Found, paper: Stated, when: str, why: str) -> Row:
    return Row(
        quantity=f"samples of Lazarus over {other}, {of.name}, {when}",
        unit="×",
        paper=paper,
        ours=_rate(found["Lazarus"]) / _rate(found[other]),
        how="simulation",
        why=why,
    )


def figure_6() -> list[Row]:
    """Return the rows for a node lost every 5 minutes."""
    rows = []
    for of, restart, groups in ((SMALL, 2.8, 1.4), (LARGE, 5.7, 2.8)):
        found = outcomes(of, 30, (0, 50, 250), [one_by_one(5)])
        for other, value in (("DS", restart), ("DS(FT)", groups)):
            paper = stated("section 6.2; Figure 6", value)
            rows.append(_over(of, other, found, paper, "30 min, a loss each 5 min", SETTING))
    rows.append(
        Row(
            quantity="samples a second while training, DS(FT) over DS, GPT-M on 8 of 9 nodes, minutes 5 to 10",
            unit="×",
            paper=stated("section 6.2; Figure 6", 1.6),
            ours=_window_speed("DS(FT)") / _window_speed("DS"),
            how="simulation",
            why="as above. The paper explains it by the load, which is less even at the earlier step of DS; ours "
            "changes slowly, until step 4000",
        )
    )
    return rows


def _window_speed(name: str) -> float:
    """Return steps of GPT-M per second of training between minutes 5 and 10, with a loss at minute 5."""
    before, after = (outcomes(MIDDLE, minutes, (0, 50, 250), [one_by_one(5)])[name] for minutes in (5, 10))
    steps = sum(late.steps - early.steps for early, late in zip(before, after, strict=True))
    return steps / sum(
        late.seconds_by_cause["train"] - early.seconds_by_cause["train"]
        for early, late in zip(before, after, strict=True)
    )


def figure_7() -> list[Row]:
    """Return the rows for a node lost every 40 minutes."""
    why = (
        "as in lazarus-f6, with checkpoints every 200 and 1000 steps. Losses hardly count here: what is left is the "
        "load, which is nearly even for most of our 4 hours"
    )
    rows = []
    for of, value in ((SMALL, 1.6), (LARGE, 2.3)):
        found = outcomes(of, 240, (0, 200, 1000), [one_by_one(40)])
        paper = stated("section 6.2; Figure 7", value)
        rows.append(_over(of, "DS", found, paper, "240 min, a loss each 40 min", why))
    calm = outcomes(MIDDLE, 40, (0, 200, 1000), [])
    speed = {name: fmean(each.steps / each.seconds_by_cause["train"] for each in of) for name, of in calm.items()}
    rows.append(
        Row(
            quantity="samples a second while training, Lazarus over DS, GPT-M on 10 nodes, first 40 min",
            unit="×",
            paper=quotient("section 6.2; Figure 7", 45, 34),
            ours=speed["Lazarus"] / speed["DS"],
            how="simulation",
            why="samples a second in the paper; ours is what the busiest node makes of half of a step",
        )
    )
    return rows


@cache
def _through_spot(of: Trained) -> Found:
    return outcomes(of, 80, (250, 50, 250), spot())


def figure_9() -> list[Row]:
    """Return the rows of samples through the spot trace."""
    why = (
        "the segment of Bamboo's trace is not in our copy: the loss of 4 nodes at minute 34 that the paper reports, "
        "and one node lost every 5 min on average, all back after 10 min, stand for it, drawn 12 times; else as in "
        "lazarus-f6. evermoe lets newcomers in at the next step, the others gather them for 2 min. DS(FT) falls back "
        "to checkpoints of GPT-L for longer than in the paper (lazarus-f11)"
    )
    rows = []
    for of, restart, groups, fewer in ((SMALL, 2.3, 1.2, 51), (LARGE, 3.4, 1.8, 48)):
        found = _through_spot(of)
        for other, value in (("DS", restart), ("DS(FT)", groups)):
            rows.append(_over(of, other, found, stated("section 6.4; Figure 9", value), "80 min of spot nodes", why))
        rows.append(
            Row(
                quantity=f"samples of DS, fewer than those of DS(FT), {of.name}",
                unit="%",
                paper=stated("section 6.4; Figure 9", fewer),
                ours=100 * (1 - _rate(found["DS"]) / _rate(found["DS(FT)"])),
                how="simulation",
                why=why,
            )
        )
    return rows


def _share(of: Outcome, causes: Sequence[str]) -> float:
    """Return the share of the time after the first start that these causes took."""
    spent = {cause: of.seconds_by_cause.get(cause, 0.0) for cause in causes}
    first = {"start": Constants().start_seconds, "rebuild": Constants().rebuild_seconds}
    later = sum(seconds - first.get(cause, 0.0) for cause, seconds in spent.items())
    return later / (of.seconds - _started())


def figure_11() -> list[Row]:
    """Return the rows of time by cause through the spot trace."""

    def row(of: Trained, name: str, quantity: str, paper: Stated, causes: Sequence[str], why: str) -> Row:
        found = _through_spot(of)[name]
        spent = [_share(each, causes) for each in found]
        return Row(
            quantity=f"time of {name} that {quantity}, {of.name}",
            unit="%",
            paper=paper,
            ours=100 * fmean(spent),
            how="simulation",
            why=why,
        )

    place, rows = "section 6.5.2; Figure 11", []
    connecting = ("detect", "agree", "rebuild", "survey", "fetch", "verify", "protect")
    restarting = ("start", "detect", "rebuild", "fetch", "repeat")
    for of in (SMALL, LARGE):
        rows.append(
            row(
                of,
                "DS",
                "checkpoints and restarts take",
                stated(place, at_least=50),
                (*restarting, "checkpoint", "wait"),
                "what lazarus-f9 simulates: checkpoints, and from a loss until the steps since the checkpoint are "
                "computed again",
            )
        )
        rows.append(
            row(
                of,
                "Lazarus",
                "reconfigurations take",
                stated(place, at_most=10),
                connecting,
                "as above, until training resumes; 25 s of each are the assumed 15 to notice a loss and 10 to connect, "
                "and joins connect again, too",
            )
        )
    for of in (SMALL, LARGE):
        rows.append(
            Row(
                quantity=f"returns of Lazarus to a checkpoint in 80 min of spot nodes, {of.name}",
                unit="",
                paper=stated("section 6.4", 1),
                ours=fmean(each.checkpoint_loads for each in _through_spot(of)["Lazarus"]),
                how="simulation",
                why="what lazarus-f9 simulates, mean over its 12 draws; the paper's is the loss of 4 nodes at minute "
                "34",
            )
        )
    found = _through_spot(LARGE)["DS(FT)"]
    repeated = sum(each.seconds_by_cause["repeat"] for each in found)
    rows.append(
        Row(
            quantity="progress that DS(FT) loses by a return to a checkpoint, GPT-L",
            unit="min",
            paper=stated("section 6.4", at_least=3, at_most=5),
            ours=repeated / sum(each.checkpoint_loads for each in found) / 60,
            how="simulation",
            why="what lazarus-f9 simulates: seconds of steps that are repeated. 250 steps of the length that the "
            f"paper's 1996 steps imply take {250 * LARGE.step_seconds / 60:.2g} min at most on all nodes",
        )
    )
    rows.append(
        row(
            LARGE,
            "DS(FT)",
            "restarts take",
            stated(place, 27),
            ("start", "fetch", "repeat"),
            "as above: starts, loading, and the steps since the checkpoint, of which the paper says 3 to 5 min a time",
        )
    )
    return rows
