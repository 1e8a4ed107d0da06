"""Islands: groups of processes that hold the dense part of a model together, and take part in a job as one."""

from __future__ import annotations

from dataclasses import dataclass

from evermoe.config.membership import Membership, split_addresses
from evermoe.options import check_name


@dataclass(frozen=True)
class Island:
    """The place of this process in its island.

    All islands of a job have the same size. An island joins when all its processes have come. It leaves when it loses
    one of them: the others then raise `IslandLost`.
    """

    name: str
    """Name of the island, the same for all its processes. Each start of the island needs another one."""
    position: int
    """Position of this process, from 0. The processes of one position hold the same shards."""
    size: int
    """Number of processes of the island."""

    def __post_init__(self) -> None:
        check_name("the island", self.name)
        if not 0 <= self.position < self.size:
            raise ValueError(
                f"island {self.name}: expected a position from 0 to {self.size - 1}, as its size is {self.size}, got "
                f"{self.position}"
            )

    @property
    def rank_key(self) -> str:
        """Sort key by which `rank = island index * size + position`."""
        return f"{self.name}/{self.position:06d}"

    def position_ranks(self, num_trainers: int) -> range:
        """Return the ranks that have this process's position, one in each island.

            >>> Island("a", position=1, size=2).position_ranks(6)
            range(1, 6, 2)

        Args:
            num_trainers: number of members that train.
        """
        return range(self.position, num_trainers, self.size)


def check_options(island: Island | None, options: Membership, lighthouse: str) -> None:
    """Check that islands support the options.

    Raises:
        ValueError: there is an island, and the job has several Lighthouses or this process is a spare or a replica.
    """
    if island is None:
        return
    if options.role != "train":
        raise ValueError(f"members of islands train: expected role train, got {options.role!r} in island {island.name}")
    if len(split_addresses(lighthouse)) > 1:
        raise ValueError(
            f"the processes of an island must be at one Lighthouse: expected one address in island {island.name}, got "
            f"{lighthouse!r}"
        )
