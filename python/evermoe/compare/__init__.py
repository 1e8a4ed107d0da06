"""`evermoe compare`: one model, one data set and one schedule of failures for every preset and for what others use.

`failures` says who dies and joins when. `program` is the training program of all candidates; their worker modules
differ in the fault tolerance alone. `candidates` starts them, `runner` drives one run, `outcome` makes figures of it.
"""
