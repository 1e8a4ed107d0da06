"""Keeps what a process has imported out of garbage collections: imported last by the tests' fork server.

A collection writes to each object that it visits. In a forked process each page of them would be copied for that.
"""

import gc

gc.collect()
gc.freeze()
