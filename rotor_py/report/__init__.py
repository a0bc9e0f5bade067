"""What a plan costs and keeps, for people: as text in a terminal, and as a page."""

from rotor_py.report.report import Report

__all__ = ["Report"]
