"""`evermoe simulate`: compare ways to survive on a cluster that fails, in simulated time."""
