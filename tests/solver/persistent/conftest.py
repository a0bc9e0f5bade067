"""These tests are about the compiled kernels; `test_jit_policy` compares plain Python with them."""

import math

import pytest

from tests.solver.long_chains import fresh_process


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_process(monkeypatch, spent=math.inf)
