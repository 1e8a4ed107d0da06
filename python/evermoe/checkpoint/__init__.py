"""Checkpoints and single persisted units, in folders and object stores."""
