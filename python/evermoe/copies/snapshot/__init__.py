"""Snapshots: states that are captured in the background and sent to other nodes in idle windows."""
