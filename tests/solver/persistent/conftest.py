"""These tests are about the compiled kernels; `test_plain` compares plain Python with them."""

from __future__ import annotations

import pytest

from tests.solver.pace import always_compiled


@pytest.fixture(autouse=True)
def compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    always_compiled(monkeypatch)
