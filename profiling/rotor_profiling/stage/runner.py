"""The ways in which an executor runs a stage, as far as measuring has to know them.

Measuring calls the executor's own code: what is measured is then what runs in training, to the byte. The executor is
above this package, so this file only says what it has to look like.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Attached(Protocol):
    """A stage that was run again with a graph of its own."""

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Gradients of the input's tensors, then of the parameters, for those of the outputs."""


class Runner(Protocol):
    """The ways in which an executor runs a stage."""

    function: Callable[..., Any]

    @property
    def can_skip_output(self) -> bool:
        """Whether a run that skips its output differs from others."""

    def make_ready(self) -> None:
        """Make what a run makes only once, so that it is not timed."""

    def forward(self, value: Any, *, skip_output: bool = False) -> Any:
        """Run the stage in the graph that is being built around it; with `skip_output`, the output has no values."""

    def first(self, value: Any) -> tuple[Any, Any]:
        """Run it without a graph; return its output, and its surroundings for running it again."""

    def before_first(self, value: Any) -> tuple[Any, int] | None:
        """Surroundings for running it again, as before a first run, and the most bytes that this would hold beyond
        those before it; None if only a first run tells.
        """

    def again(self, value: Any, surroundings: Any) -> Any:
        """Run it once more without a graph, exactly as the first time."""

    def attach(self, value: Any, surroundings: Any, *, skip_output: bool = False) -> tuple[Attached, Any]:
        """Run it once more with a graph of its own, exactly as the first time; return that, and the output."""
