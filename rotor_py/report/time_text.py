"""Seconds as people read them."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """Three significant digits and a unit."""
    for factor, unit in ((1.0, "s"), (1e3, "ms"), (1e6, "µs")):
        scaled = seconds * factor
        if scaled >= 0.9995 or unit == "µs":
            return f"{scaled:.{2 if scaled < 9.995 else 1 if scaled < 99.95 else 0}f} {unit}"
    raise AssertionError
