"""After a failure: what survives, what is missing, and getting it."""
