"""The demo: a byte-level GPT with MoE layers that survives kills while you watch.

`model` and `corpus` are an ordinary PyTorch program, `train` the script that each worker runs (also on GPUs, under
`evermoe run`), `drive` starts, kills and joins workers and `summary` turns their events into the verdict.
"""
