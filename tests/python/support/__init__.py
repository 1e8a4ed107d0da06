"""What tests share. In a process that started with the stand-ins of CUDA, torch's ops work on their devices."""

import os

if "EVERMOE_TEST_STREAMS" in os.environ:
    from support import stand_in as stand_in
