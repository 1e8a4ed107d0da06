"""Lighthouses whose job has ended in this process: a second job there would wait for workers of the first."""

_ended: set[str] = set()


def remember(lighthouse: str | None) -> None:
    """Record that the job of a Lighthouse has ended; None: a job of this process alone, which may be one of many."""
    if lighthouse is not None:
        _ended.add(lighthouse)


def check_is_first(lighthouse: str) -> None:
    """Check that no job of this Lighthouse has ended in this process.

    Raises:
        RuntimeError: one has.
    """
    if lighthouse in _ended:
        raise RuntimeError(
            f"a job of the Lighthouse {lighthouse} has ended in this process, and its other workers may still be in "
            "it, or be started again: under a Lighthouse (evermoe run, torchrun, srun) a script has one session. Give "
            "the second training a script and a start of its own"
        )
