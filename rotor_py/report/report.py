"""The report of a plan, as a user gets it: printed, shown in a notebook, or written as a page."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rotor_py.report.facts import ReportFacts
from rotor_py.report.html.page import frame, page
from rotor_py.report.sweep import Sweep
from rotor_py.report.sweeping import sweep_of


@dataclass(frozen=True, slots=True)
class Report(ReportFacts):
    """A measured model, its budget and its plan. `mem_limit`, in bytes, is None where none was set.

    `str` is the report for a terminal; in a notebook, and as a file, it is a page. The numbers are those of
    `ReportFacts`: bytes and seconds.
    """

    def __str__(self) -> str:
        # Imported here because the import of rich takes time, and most who train never print a report.
        from rotor_py.report.terminal.text import plain_text

        return plain_text(self)

    def _repr_html_(self) -> str:
        return frame(page(self, self._swept()))

    def to_html(
        self,
        path: str | os.PathLike[str],
        remarks: tuple[str, ...] = (),
        *,
        usage: str = "",
        made: datetime | None = None,
    ) -> None:
        """Write one self-contained page, which loads nothing: no script, style, font or image from elsewhere.

        `remarks` are shown as lines under the verdict, `usage` as the Python that follows the plan; `made` is the date
        of the page, if that is not now. OSError if the file cannot be written.
        """
        Path(path).write_text(page(self, self._swept(), remarks, usage, made), encoding="utf-8")

    def _swept(self) -> Sweep:
        """The curve, solved for now if it is not known: only pages show it, and it takes time."""
        return sweep_of(self) if self.sweep is None else self.sweep
