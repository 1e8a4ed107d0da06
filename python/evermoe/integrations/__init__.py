"""Models and loops of other libraries under `evermoe.Session`; each module needs its library."""
