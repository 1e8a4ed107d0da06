"""Helpers that the tests share: worker processes and their records, kernels on the CPU, ranks, models and numbers."""

import os

if "EVERMOE_TEST_STREAMS" in os.environ:  # this process has the stand-ins of CUDA
    from support import stand_in as stand_in
