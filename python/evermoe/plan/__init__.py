"""`evermoe plan`: compares placements for a load before a run. No process is started and nothing is trained."""
