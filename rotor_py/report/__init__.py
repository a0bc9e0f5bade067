"""Report the cost of a plan as text in a terminal and as an HTML page."""

from rotor_py.report.report import Report

__all__ = ["Report"]
