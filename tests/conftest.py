"""Tests that draw their examples draw the same ones at every run, unless told `--hypothesis-profile=explore`.

Where several processes share the tests (`-n 2`), each has one thread: threads that outnumber cores wait for each other.
Tests that are not marked `gpu` are about the CPU, on machines with CUDA devices as well.
"""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is there, and for what tests start
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # see docs/limit.md: peaks are exact with it
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else sums are in no fixed order

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, database=None)
settings.register_profile("explore", deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def without_cuda_unless_asked_for(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the test nor a process that it starts finds a CUDA device."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
