"""The ways to store a compiled stage: other partitions of its graph, by the budgets that PyTorch's partitioner has.

Without a budget, that keeps what is expensive to make, and what is cheap runs again in kernels that are there anyway.
With one, it keeps so much of that, and operators such as products of matrices run again in the compiled backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from rotor_py.errors import InvalidValueError

if TYPE_CHECKING:
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

BUDGETS = (0.6, 0.3, 0.1)
"""Parts of what is kept without a budget. A guess: a stage is small, and further ones are often the same partition."""
_WAY = "within a budget of {:.0%}"


def way_of(budget: float) -> str:
    """The name of the way to store a stage with this budget."""
    return _WAY.format(budget)


def budget_of(way: str) -> float:
    """The budget of a way. ValueError if it is another way."""
    for budget in BUDGETS:
        if way == way_of(budget):
            return budget
    raise InvalidValueError(f"a compiled stage has no way {way!r}", kind="unknown_way", name=way)


def is_budget(way: str) -> bool:
    """Whether a way to store a stage is one of compiled code."""
    return way in map(way_of, BUDGETS)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """How a partition differs from the one without a budget, as far as the graph of forward and backward shows.

    It saves so many `bytes` instead of `usual_bytes`, takes `temp_bytes` more beside them while the backward runs, and
    in all `longer` times as long.
    """

    way: str
    bytes: int
    usual_bytes: int
    temp_bytes: int
    longer: float


class OnlySurveyedError(Exception):
    """Ends a compilation whose joint graph was only to be looked at."""

    def __init__(self, found: tuple[Foreseen, ...]) -> None:
        super().__init__()
        self.found = found


class Partitions(Protocol):
    """The partitions of stages by budgets."""

    def survey(self) -> CustomPartitionerFn:
        """What stands in for a partitioner, and raises OnlySurveyedError."""

    def within(self, budget: float) -> CustomPartitionerFn:
        """What partitions a stage by this budget."""
