"""The way to store a stage with some of what it saves in another tier of memory.

The stage runs as it does where all of that stays: stored whole, in part, or packed. What leaves, and when, concerns the
whole step (`execute.moving`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rotor_py.stage.protocol import Run
from rotor_py.stage.ways.keeper import Keeper, Known, Trial


class _Elsewhere:
    name = "elsewhere"
    keeps_the_rest = True

    def suits(self, function: Callable[..., Any]) -> bool:
        return True

    def keeping(self, run: Run, function: Callable[..., Any]) -> Run:
        return run

    def trial(self, function: Callable[..., Any]) -> Trial:
        return Known(pays=False)  # it costs what the same way costs without it, beside the bytes that leave


ELSEWHERE: Keeper = _Elsewhere()
"""Offered to runners where a plan may move; `measure.stage_ways` has its bytes."""
