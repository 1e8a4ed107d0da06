"""State of one process: random seeds, warnings, memory folders, claims on folders; events and logs of workers."""
