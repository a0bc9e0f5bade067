"""The operations that a training step is made of, in the notation of Beaumont et al., "Optimal checkpointing for
heterogeneous chains" (HAL hal-02352969).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForwardEnable:
    """Run stage `stage` forward in the way `option`, and keep everything that its backward will need."""

    stage: int
    option: int = 0

    def __str__(self) -> str:
        return f"Fe_{self.stage}^{self.option}" if self.option else f"Fe_{self.stage}"


@dataclass(frozen=True, slots=True)
class ForwardCheck:
    """Run stage `stage` forward without a graph, and keep its input as a checkpoint."""

    stage: int

    def __str__(self) -> str:
        return f"CF_{self.stage}"


@dataclass(frozen=True, slots=True)
class ForwardNograd:
    """Run stage `stage` forward without a graph, and forget its input."""

    stage: int

    def __str__(self) -> str:
        return f"Fn_{self.stage}"


@dataclass(frozen=True, slots=True)
class Loss:
    """Compute the loss from the chain's output, and the gradient of the loss with respect to that output."""

    def __str__(self) -> str:
        return "L"


@dataclass(frozen=True, slots=True)
class Backward:
    """Run stage `stage` backward, from the gradient of its output to the gradient of its input."""

    stage: int

    def __str__(self) -> str:
        return f"B_{self.stage}"


Operation = ForwardEnable | ForwardCheck | ForwardNograd | Loss | Backward
