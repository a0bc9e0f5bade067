"""Tests that draw their examples draw the same ones at every run, unless told `--hypothesis-profile=explore`.

Where several processes share the tests (`-n 2`), each has one thread: threads that outnumber cores wait for each other.
"""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is there, and for what tests start

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")
