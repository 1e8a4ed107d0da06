"""`evermoe plan`: compares placements for a load, and ways to keep copies. Nothing is started or trained."""
