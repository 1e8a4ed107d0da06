"""Recording of training steps: what keeps the network, the host link and compute busy, and when they are idle.

    hooks and wrapped methods ─ spans of each step ─ windows of this rank ─ windows of all ranks on one clock ─ traces

`Profiler` records with CUDA events on a GPU and a monotonic clock on the CPU, for plain loops, for a `Session`, and
for the schedules of `torch.distributed.pipelining`, without a change to the model. `evermoe.planning.windows`
explains the use of windows.
"""

from evermoe.profile.profiler import Profiler

__all__ = ["Profiler"]
