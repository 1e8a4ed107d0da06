"""Options of a session in groups: `Membership`, `Placement`, `Checkpoints`. `evermoe.presets` has those of each preset.

Command-line flags and environment variables are derived from the fields of these dataclasses (`flags`, `variables`).
Nothing here imports torch, which takes seconds.
"""
