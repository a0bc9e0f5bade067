"""Results of `rotor-plan` as data, from which it makes its text, HTML page, JSON and trace."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rotor_py.report import Report
from rotor_py.validate.comparison import ComparedStrategy
from rotor_py.validate.verification import Verification


@dataclass(frozen=True, slots=True)
class Taken:
    """Facts of a script's first step: `trained` is a number of parameters, `others` are classes of its other models."""

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
    """The report of `rotor-plan`: a `Report` with the results of --verify and --compare, and facts of a script."""

    mem_limit: int
    # Python text of the arguments, besides the limit, with which `Checkpointable` makes this plan
    arguments: tuple[str, ...] = ()
    verified: Verification | None = None
    compared: tuple[ComparedStrategy, ...] = ()
    # False for --sweep alone, which asks for no plan: `sequence` then stores everything, and `mem_limit` is its peak
    limited: bool = True
    taken: Taken | None = None  # the script's first training step; None for a model file

    def remarks(self) -> tuple[str, ...]:
        taken = () if self.taken is None else self.taken.sentences()
        return (*taken, *Report.remarks(self))  # `super()` would raise TypeError: slots make another class

    def problem(self) -> str | None:
        """Report the first step of --verify that exceeds the limit or differs from plain training; None if all pass."""
        for begin, found in (("", self.verified), *((f"{row.strategy}: ", row.verified) for row in self.compared)):
            if found is not None and (problem := found.problem(self.mem_limit)) is not None:
                return begin + problem
        return None
