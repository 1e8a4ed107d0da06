"""Training loops that survive failures: `Session` and pipelines."""
