"""The command `evermoe`."""
