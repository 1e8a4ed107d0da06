"""Copies of the state in memory: planned, made in idle time, kept current by replay."""
