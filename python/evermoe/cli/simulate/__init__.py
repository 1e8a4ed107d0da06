"""`evermoe simulate`: ways to survive on a cluster that fails, compared in simulated time."""
