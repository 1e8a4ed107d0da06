"""Gemini: location of copies in the memory of other machines, and survival; times are in `gemini_times`."""

from __future__ import annotations

import math
from itertools import combinations, product

from benches.papers import gemini_recovery, gemini_times
from benches.papers.figure import Figure, Row, stated
from evermoe.planning.holders import copy_holders
from evermoe.planning.survival import copy_recovery_probability


def survival(machines: int, copies: int, failures: int, policy: str = "mixed") -> float:
    """Probability that copies of every machine remain, in percent."""
    names = [f"machine{number:04}" for number in range(machines)]
    holders = copy_holders(names, copies, policy=policy)  # type: ignore[arg-type]
    return 100 * float(copy_recovery_probability(holders, failures))


def counted_once(machines: int, copies: int, failures: int) -> float:
    """The count of Corollary 1's first case, f < 2k, for every f, in percent: 1 - C(N/k, 1) C(N-k, f-k) / C(N, f).

    From f = 2k on it counts losses of two groups twice, as the proof says, and so it is a lower bound.
    """
    fatal = machines // copies * math.comb(machines - copies, failures - copies)
    return 100 * (1 - fatal / math.comb(machines, failures))


def _fatal(machines: int, copies: int, policy: str) -> int:
    """Count the losses of k machines, k copies, that take all copies of one machine."""
    names = [f"machine{number:04}" for number in range(machines)]
    holders = [set(found) for found in copy_holders(names, copies, policy=policy)]  # type: ignore[arg-type]
    losses = combinations(range(machines), copies)
    return sum(any(found <= set(lost) for found in holders) for lost in losses)


def _figure_3() -> list[Row]:
    group, ring = _fatal(4, 2, "group"), _fatal(4, 2, "ring")
    return [
        Row(
            quantity="pairs of 4 machines whose loss is fatal, 2 copies, groups",
            unit="",
            paper=stated("section 4; Figure 3a", 2),
            ours=group,
            how="exact",
            why="all pairs, with the holders of `copy_holders`",
        ),
        Row(
            quantity="the same, ring",
            unit="",
            paper=stated("section 4; Figure 3b", 4),
            ours=ring,
            how="exact",
            why="as above",
        ),
        Row(
            quantity="how much less likely groups must read remote storage than a ring",
            unit="%",
            paper=stated("section 4", 50),
            ours=100 * (1 - group / ring),
            how="exact",
            why="as above",
        ),
    ]


def _fewest_fatal(machines: int) -> int:
    """Count the fatal pairs of the best assignment of every machine's second copy to another machine."""
    others = [[other for other in range(machines) if other != machine] for machine in range(machines)]
    return min(len({frozenset(pair) for pair in enumerate(chosen)}) for chosen in product(*others))


def _theorem_1() -> list[Row]:
    largest = 0.0
    for copies in (2, 3):
        for machines in range(2 * copies, 13):
            least = -(-machines // copies)
            gap = _fatal(machines, copies, "mixed") - least
            largest = max(largest, gap / (2 * copies - 3))
    return [
        Row(
            quantity="pairs whose loss is fatal, best of all placements of 2 copies on 6 machines",
            unit="",
            paper=None,
            ours=_fewest_fatal(6),
            how="exact",
            why=f"all 15,625 placements. Groups have {_fatal(6, 2, 'group')}, N / k, which the theorem calls optimal",
        ),
        Row(
            quantity="gap to the bound of any placement over (2k - 3) / C(N, k), largest for N up to 12 and k of 2 "
            "and 3",
            unit="",
            paper=stated("section 4, Theorem 1; appendix A", at_most=1),
            ours=largest,
            how="exact",
            why="every loss of k machines counted, with the holders of `copy_holders`; the theorem's bound is reached",
        ),
    ]


def _figure_9() -> list[Row]:
    rows = [
        Row(
            quantity="recovery from memory, 16 machines, 2 copies, 2 lost at once",
            unit="%",
            paper=stated("section 4, Corollary 1; section 7.2, Figure 9", 93.3),
            ours=survival(16, 2, 2),
            how="exact",
            why="`copy_recovery_probability` counts every loss",
        ),
        Row(
            quantity="losses of 2 of 16 machines that need remote storage",
            unit="%",
            paper=stated("section 7.2; Figure 10", 6.7),
            ours=100 - survival(16, 2, 2),
            how="exact",
            why="as above",
        ),
    ]
    for lost in (1, 3):
        rows.append(
            Row(
                quantity=f"recovery from memory, 16 machines, 2 copies, {lost} lost at once",
                unit="%",
                paper=stated("section 4, appendix B", 100) if lost == 1 else None,
                ours=survival(16, 2, lost),
                how="exact",
                why="fewer losses than copies" if lost == 1 else "drawn in Figure 9 without a number in our copy",
            )
        )
    rows.append(
        Row(
            quantity="recovery from memory, 16 machines in a ring, 2 copies, 2 lost at once",
            unit="%",
            paper=None,
            ours=survival(16, 2, 2, "ring"),
            how="exact",
            why="the paper says that groups are clearly better, without a number in our copy",
        )
    )
    return rows


def _corollary_1() -> list[Row]:
    return [
        Row(
            quantity=f"recovery from memory, {machines} machines, 2 copies, {lost} lost at once",
            unit="%",
            paper=None,
            ours=survival(machines, 2, lost),
            how="exact",
            why="`copy_recovery_probability` counts every loss once. The proof claims a bound for f ≥ 2k; "
            f"the count of its first case would give {counted_once(machines, 2, lost):.4g} %",
        )
        for machines, lost in ((8, 4), (16, 8))
    ]


FIGURES = (
    Figure(id="gemini-eq1", title="Equation 1 and section 2.2: wasted time", rows=gemini_times.equation_1),
    Figure(id="gemini-f3", title="Figure 3: groups and rings", rows=_figure_3),
    Figure(id="gemini-theorem1", title="Theorem 1: how near to the best placement", rows=_theorem_1),
    Figure(
        id="gemini-corollary1",
        title="Corollary 1: recovery probability where f ≥ 2k machines are lost",
        rows=_corollary_1,
        note="The formula is missing in our copy. Its proof, Case 2, says that the count of Case 1 (k ≤ f < 2k) then "
        "counts some losses twice, and claims a bound. For f < 2k see gemini-f9.",
    ),
    Figure(
        id="gemini-t2",
        title="Table 2: sizes of the models",
        rows=gemini_times.table_2,
        note="Our copy, which is notes on the paper, has the numbers of one model alone.",
    ),
    Figure(
        id="gemini-f7", title="Figures 7 and 8: a step's time, and idle time of the network", rows=gemini_times.figure_7
    ),
    Figure(id="gemini-f9", title="Figure 9: probability of recovery from memory", rows=_figure_9),
    Figure(id="gemini-f10", title="Figure 10: average wasted time", rows=gemini_times.figure_10),
    Figure(id="gemini-f11", title="Figure 11: time of a checkpoint", rows=gemini_times.figure_11),
    Figure(id="gemini-f12", title="Figure 12: frequency of checkpoints", rows=gemini_times.figure_12),
    Figure(
        id="gemini-f13",
        title="Figure 13: other models on p3dn.24xlarge",
        note="Not stated in our copy: it says that nothing is delayed on them either, without step or idle times.",
    ),
    Figure(id="gemini-f14", title="Figure 14: parts of a recovery", rows=gemini_recovery.figure_14),
    Figure(
        id="gemini-f15",
        title="Figure 15: effective training time by failures and instances",
        rows=gemini_recovery.figure_15,
    ),
    Figure(id="gemini-s54", title="Section 5.4: the profile of a step", rows=gemini_times.profile),
    Figure(id="gemini-f16", title="Figure 16: ways to interleave copies with training", rows=gemini_times.figure_16),
)
"""All figures of Gemini, in the paper's order."""
