"""All figures by ID."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

from benches.papers import baft, gemini, lazarus, moetion, pec
from benches.papers.figure import PAPERS, Figure

FIGURES: Mapping[str, Figure] = {
    figure.id: figure for module in (gemini, pec, lazarus, baft, moetion) for figure in module.FIGURES
}
"""Every figure, paper by paper."""


def find(names: Sequence[str], *, is_slow: bool = False) -> list[Figure]:
    """Return the figures that IDs, papers or `all` name, in the order of the registry.

    Args:
        names: IDs, each alone; prefixes of IDs that name a paper, such as `gemini`; or `all`.
        is_slow: whether papers and `all` include the slow figures. A slow figure named itself is always included.

    Raises:
        ValueError: a name is unknown; the message lists similar ones.
    """
    chosen: set[str] = set()
    for name in names:
        if name in FIGURES:
            chosen.add(name)
        elif name == "all" or name in PAPERS:
            of = [figure for figure in FIGURES.values() if name == "all" or figure.id.startswith(f"{name}-")]
            chosen |= {figure.id for figure in of if is_slow or not figure.is_slow}
        else:
            close = get_close_matches(name, [*FIGURES, *PAPERS], n=3, cutoff=0.4)
            hint = f"did you mean {', '.join(close)}?" if close else "python -m benches.papers list has all"
            raise ValueError(f"expected the ID of a figure, a paper, or all; got {name!r}: {hint}")
    return [figure for figure in FIGURES.values() if figure.id in chosen]
