"""Tests that draw their examples draw the same ones at every run, unless told `--hypothesis-profile=explore`."""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")
