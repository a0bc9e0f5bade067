"""The strategies that `Checkpointable` takes as arguments: checkpointing by hand, in place of an optimal plan."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from rotor_py.by_hand.by_level import ByLevel
from rotor_py.by_hand.checkpoint_config import whole_number
from rotor_py.by_hand.levels import checked_level
from rotor_py.measure.budget import Budget
from rotor_py.units import format_bytes, limit_text
from rotor_solver import Algorithm, InfeasibleError, Periodic, Sequence, StoreAll

_NO_LIMIT = 2**62
"""More bytes than any strategy needs. Whether it fits is checked afterwards, so that the error can say both numbers."""


@dataclass(frozen=True, slots=True)
class ByHand:
    """Keep the inputs of all modules of `level`, or of the stages 0, n, 2n, … for n = `every_n_layers`.

    Raises ValueError if both are given, if `max_checkpoints` is given without `every_n_layers`, for numbers that are
    not whole or below zero, and for a level that does not exist.
    """

    level: int | None = None
    every_n_layers: int | None = None
    max_checkpoints: int | None = None

    def __post_init__(self) -> None:
        if self.level is not None and self.every_n_layers is not None:
            raise ValueError(f"{self} are two strategies; give only one of them")
        if self.max_checkpoints is not None and self.every_n_layers is None:
            raise ValueError(f"{self} limits the checkpoints of every_n_layers, which is not given; give both or none")
        if self.level is not None:
            checked_level(self.level)
        if self.every_n_layers is not None:
            whole_number(self.every_n_layers, "every_n_layers")
        if self.max_checkpoints is not None:
            whole_number(self.max_checkpoints, "max_checkpoints")

    @classmethod
    def asked_for(cls, level: int | None, every_n_layers: int | None, max_checkpoints: int | None) -> ByHand | None:
        """The strategy that these arguments ask for; None if they ask for none, so that the plan is the optimal one.

        Raises ValueError as the constructor does.
        """
        strategy = cls(level, every_n_layers, max_checkpoints)
        return None if strategy == cls() else strategy

    def __str__(self) -> str:
        given = {name: getattr(self, name) for name in ("level", "every_n_layers", "max_checkpoints")}
        return ", ".join(f"{name}={value!r}" for name, value in given.items() if value is not None)

    def algorithm(self, model: nn.Module) -> Algorithm:
        """The algorithm that makes the sequence for the measured stages of `model`."""
        if self.level:  # level 0 checkpoints nothing
            return ByLevel.of(model, self.level)
        if self.every_n_layers and self.max_checkpoints != 0:
            return Periodic(every=self.every_n_layers, max_checkpoints=self.max_checkpoints)
        return StoreAll()  # without checkpoints all is one segment, which would be run again at once: so it is stored

    def sequence(self, model: nn.Module, budget: Budget, mem_limit: int | None) -> Sequence:
        """The sequence of the strategy for a measured model.

        Raises InfeasibleError if it needs more than `mem_limit` bytes. A strategy is never changed to fit a limit.
        """
        sequence = self.algorithm(model).solve(budget.chain, _NO_LIMIT)
        peak = budget.peak_bytes(sequence)
        if mem_limit is not None and peak > mem_limit:
            raise InfeasibleError(
                f"a training step with {self} needs {format_bytes(peak)} ({peak} bytes), of which {budget.split()}; "
                f"the limit is {format_bytes(mem_limit)} ({mem_limit} bytes), so it would run out of memory. Try "
                f"{limit_text(peak)}, or leave "
                f"{self} out for the best plan, which needs {format_bytes(budget.least_bytes())} at least.",
                min_bytes=peak,
                mem_limit=mem_limit,
            )
        return sequence
