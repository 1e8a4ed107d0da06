"""The demo: train a byte-level GPT with MoE layers, and watch it survive kills.

`model` and `corpus` are an ordinary PyTorch program. `train` is the script of each worker; it also runs on GPUs
under `evermoe run`. `driver` starts, kills and joins workers. `summary` turns their events into the verdict,
`timeline` into the data of the picture.
"""
