"""`evermoe plan`: compare placements for a load, and ways to keep copies. It starts and trains nothing."""
