"""Versions of the state: `generation << 40 | step`. Of two lines of history the newer membership's wins."""

from evermoe._native import generation_of, step_of, version_of

__all__ = ["generation_of", "step_of", "version_of"]
