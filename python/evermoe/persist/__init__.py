"""What is on disk: checkpoints, and the units that partial presets save one by one."""
