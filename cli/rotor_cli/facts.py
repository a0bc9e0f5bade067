"""What the command found out, as data: every reporter reads these facts."""

from __future__ import annotations

from dataclasses import dataclass

from rotor_py.report import Report
from rotor_py.trials.comparison import ComparedStrategy
from rotor_py.trials.verification import Verification


@dataclass(frozen=True, slots=True)
class Facts(Report):
    """A report with a limit, and what only the command knows: options, real steps, other strategies."""

    mem_limit: int
    arguments: tuple[str, ...] = ()
    """What `Checkpointable` has to be given beside the limit to plan the same, as Python."""
    verified: Verification | None = None
    compared: tuple[ComparedStrategy, ...] = ()
    """Every strategy at the limit, the plan first."""
    limited: bool = True
    """Whether a limit was planned for. If not, `sequence` stores everything, and `mem_limit` is its peak."""

    def problem(self) -> str | None:
        """What real steps showed to be wrong, in words; None if nothing is."""
        if self.verified is not None and (problem := self.verified.problem(self.mem_limit)) is not None:
            return problem
        for row in self.compared:
            if row.verified is not None and (problem := row.verified.problem(self.mem_limit)) is not None:
                return f"{row.strategy}: {problem}"
        return None
