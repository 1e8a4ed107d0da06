"""Versions of the state: `generation << STEP_BITS | step`. Of two lines of history the newer membership's wins."""

STEP_BITS = 40
"""Room for the steps."""


def version_of(generation: int, step: int) -> int:
    """The version after so many steps, the last of them taken by the members of a generation.

    Example: step 5 of generation 2 is 2 · 2⁴⁰ + 5; it is newer than step 9 of generation 1.
    """
    return generation << STEP_BITS | step


def step_of(version: int) -> int:
    """Steps that the state of a version has taken."""
    return version & ((1 << STEP_BITS) - 1)


def generation_of(version: int) -> int:
    """The membership that has made a version."""
    return version >> STEP_BITS
