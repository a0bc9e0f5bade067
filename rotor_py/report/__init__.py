"""Reports of a plan and its costs: as text for a terminal and as an HTML page."""

from rotor_py.report.report import Report

__all__ = ["Report"]
