"""Results of the command as data, read by every reporter."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rotor_py.report import Report
from rotor_py.validate.comparison import ComparedStrategy
from rotor_py.validate.verification import Verification


@dataclass(frozen=True, slots=True)
class Taken:
    """Observations of a script's first training step."""

    script: str
    arguments: tuple[str, ...]
    model: str
    trained: int
    input: str
    optimizer: str | None
    own_loss: bool
    others: tuple[str, ...]

    def sentences(self) -> tuple[str, ...]:
        loss = "its own loss" if self.own_loss else "a loss computed outside of it"
        found = (
            f"Taken from the first training step of {Path(self.script).name}: {self.model}, which trains "
            f"{self.trained:,} parameters, on {self.input}, "
            f"with {loss} and {self.optimizer or 'no optimizer of torch'}."
        )
        if not self.others:
            return (found,)
        verb, pronoun = ("are", "them") if len(self.others) > 1 else ("is", "it")
        others = f"The script trains {', '.join(self.others)} as well, which {verb} smaller"
        return found, f"{others}: plan and limit do not include {pronoun}."


@dataclass(frozen=True, slots=True)
class Facts(Report):
    """A report with a limit and the command's own facts: options, real steps, other strategies."""

    mem_limit: int
    # Arguments of `Checkpointable`, other than the limit, that reproduce the plan, as Python
    arguments: tuple[str, ...] = ()
    verified: Verification | None = None
    compared: tuple[ComparedStrategy, ...] = ()
    # Whether there was a limit to plan for. If False, `sequence` stores everything, and `mem_limit` is its peak.
    limited: bool = True
    taken: Taken | None = None  # Observations of a script; None for a model file

    def remarks(self) -> tuple[str, ...]:
        taken = () if self.taken is None else self.taken.sentences()
        return (*taken, *Report.remarks(self))  # not `super()`, which fails in a dataclass with slots

    def problem(self) -> str | None:
        """Describe the first problem that real steps showed; None if they showed none."""
        for begin, found in (("", self.verified), *((f"{row.strategy}: ", row.verified) for row in self.compared)):
            if found is not None and (problem := found.problem(self.mem_limit)) is not None:
                return begin + problem
        return None
