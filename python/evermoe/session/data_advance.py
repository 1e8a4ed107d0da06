"""Advances the data of a job with its steps, and exchanges the states of readers among the members."""

from __future__ import annotations

from evermoe.comm.group import Group
from evermoe.comm.vote import Ballot
from evermoe.data.reader_states import states_of
from evermoe.data.readers import ElasticReaders
from evermoe.data.sampler import Sampler


class DataAdvance:
    """Advances a sampler by what the members have voted.

    Args:
        sampler: of this member.
        group: the members that train.
    """

    def __init__(self, sampler: Sampler, group: Group) -> None:
        self._sampler, self._states, self._group = sampler, states_of(sampler), group
        self._exchanged: list[bytes] = []

    def exchange(self) -> None:
        """Exchange the states of readers before the vote, if it is time; collective.

        Raises:
            PeerLost: a member is gone.
        """
        if self._states is not None and self._states.is_due:
            self._exchanged = self._group.all_gather_bytes(self._states.own())

    def advance(self, sums: Ballot) -> None:
        """Count the batch of a step that is taken as consumed."""
        if self._states is not None and self._states.is_due:
            self._states.keep(self._exchanged)
        if isinstance(self._sampler, ElasticReaders):
            self._sampler.agree(sums.missing, sums.remaining)
        self._sampler.advance()
