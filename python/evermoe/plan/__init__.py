"""`evermoe plan`: compares placements for a load, and ways to keep copies, before a run. Nothing is started or trained."""
