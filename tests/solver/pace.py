"""Having the solver work by compiled kernels alone, or by plain Python alone."""

from __future__ import annotations

import math

import pytest

from rotor_solver.arrays import pace


def always_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, whatever there are kernels for is done by them."""
    for name in ("_IMPORTING", "_COMPILING_OTHERS"):
        monkeypatch.setattr(pace, name, -1.0)
    monkeypatch.setattr(pace, "_COMPILING", {})
    monkeypatch.setattr(pace, "_compiled", set(pace._compiled))


def never_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on, everything is done by plain Python and NumPy, except for tables in single precision."""
    monkeypatch.setattr(pace, "_IMPORTING", math.inf)
    monkeypatch.setattr(pace, "_compiled", set())
