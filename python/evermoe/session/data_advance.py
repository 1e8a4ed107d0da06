"""Advances the data of a job with its steps, and exchanges the states of readers among the members."""

from __future__ import annotations

import logging

from evermoe.comm.group import Group
from evermoe.comm.vote import Ballot
from evermoe.data.reader_states import states_of
from evermoe.data.readers import ElasticReaders
from evermoe.data.sampler import Sampler
from evermoe.events import SampleSkipped
from evermoe.events.base_event import Listener

logger = logging.getLogger(__name__)

MAX_WARNINGS = 10
"""Number of samples left out by a member that are each logged."""


class DataAdvance:
    """Advances a sampler by what the members have voted.

    Args:
        sampler: of this member.
        group: the members that train.
        emit: of the session.
    """

    def __init__(self, sampler: Sampler, group: Group, emit: Listener) -> None:
        self._sampler, self._states, self._group, self._emit = sampler, states_of(sampler), group, emit
        self._warnings_left = MAX_WARNINGS
        self._exchanged: list[bytes] = []

    def exchange(self) -> None:
        """Exchange the states of readers before the vote, if it is time; collective.

        Raises:
            PeerLost: a member is gone.
        """
        if self._states is not None and self._states.is_due:
            self._exchanged = self._group.all_gather_bytes(self._states.own())

    def advance(self, step: int, sums: Ballot) -> None:
        """Count the batch of a step that is taken as consumed."""
        if self._states is not None and self._states.is_due:
            self._states.keep(self._exchanged)
        if isinstance(self._sampler, ElasticReaders):
            self._report_failures(step, self._sampler)
            self._sampler.agree(sums.missing, sums.remaining)
        self._sampler.advance()

    def _report_failures(self, step: int, readers: ElasticReaders) -> None:
        for reader, (number, reason) in readers.failures:
            self._emit(SampleSkipped(step, reader, readers.epoch, number, reason))
            if self._warnings_left:
                self._warnings_left -= 1
                logger.warning(
                    "sample %d of reader %d in epoch %d is left out, as it has raised %s%s",
                    number,
                    reader,
                    readers.epoch,
                    reason,
                    "" if self._warnings_left else ". Further ones are counted, but not logged",
                )
