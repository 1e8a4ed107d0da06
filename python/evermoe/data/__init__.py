"""Batches: the samplers and loaders of elastic jobs, and iterables of which their readers are made."""

from evermoe.data.mixture import Mixture as Mixture
from evermoe.data.packed import Packed as Packed
from evermoe.data.shuffled import Shuffled as Shuffled

__all__ = ["Mixture", "Packed", "Shuffled"]
