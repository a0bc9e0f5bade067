"""Having the solver work by compiled kernels alone, or by plain Python alone."""

from __future__ import annotations

import math

import pytest

from rotor_solver import jit_policy


def fresh_process(monkeypatch: pytest.MonkeyPatch, spent: float = 0.0) -> None:
    """The solver as it begins, but for so many seconds of plain work."""
    monkeypatch.setattr(jit_policy._Pace, "compiled", set())
    monkeypatch.setattr(jit_policy._Pace, "spent", spent)


def always_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, whatever there are kernels for is done by them."""
    fresh_process(monkeypatch, spent=math.inf)


def never_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, everything is done by plain Python and NumPy, except for tables in single precision."""
    fresh_process(monkeypatch, spent=-math.inf)
