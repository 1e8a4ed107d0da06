"""What one process has: random seeds, warnings, shared memory folders, claims on folders."""
