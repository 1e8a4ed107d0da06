"""`python -m benches.compare`: one model, data set and schedule of failures for every preset and for alternatives.

`failures` schedules deaths and joins. `program` is the training program of all candidates; their worker modules
differ only in the fault tolerance. `candidates` starts them, `runner` drives one run, `outcome` computes its
figures.
"""
