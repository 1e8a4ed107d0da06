"""State of one process: random seeds, warnings, shared memory folders, claims on folders."""
