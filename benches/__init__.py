"""Benches: scripts, and the packages `compare` and `papers`."""
