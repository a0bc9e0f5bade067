"""What measuring is told of a stage: how an executor runs it, where it is in a chain, and what is stepped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from rotor_profiling.stage.gradients import Layouts
from rotor_profiling.storage import bytes_like

# The ways in which an executor runs a stage, as far as measuring has to know them.
#
# Measuring calls the executor's own code: what is measured is then what runs in training, to the byte. The executor is
# above this package, so this file only says what it has to look like.


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


# A stand-in for an optimizer that steps parameters in the backward: it takes the memory of a step, and no more.
#
# Each parameter is stepped as soon as its gradient is whole, and the gradient is freed. So a backward holds fewer
# gradients than it makes, and needs what the step of a parameter needs.


Stepped = tuple[int | None, ...]
"""For each trained parameter of a stage, in the order of `trained_parameters`, the bytes that its step needs; None for
one that the stage's backward does not step."""


@contextmanager
def stand_in_steps(parameters: Sequence[torch.Tensor], stepped: Stepped) -> Iterator[None]:
    """Inside, gradients that a backward brings to `parameters` are freed as a step in the backward frees them."""
    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(_stand_in, nbytes))
        for parameter, nbytes in zip(parameters, stepped or [None] * len(parameters), strict=True)
        if nbytes is not None
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _stand_in(nbytes: int, parameter: torch.Tensor) -> None:
    torch.empty(nbytes, dtype=torch.uint8, device=parameter.device)
    parameter.grad = None


def bytes_after_replay(parameters: Sequence[torch.Tensor], stepped: Stepped) -> int:
    """What is in memory when the first parameter of a stage is stepped that was run again, beside the gradient of the
    stage's input: its node makes the gradients of all parameters before it hands on the first.
    """
    steps = [nbytes for nbytes in stepped if nbytes is not None]
    return bytes_like(parameters) + max(steps) if steps else 0


@dataclass(frozen=True, slots=True)
class StageContext:
    """Where in a chain a stage is.

    `input_bytes` is |a_i| as the chain counts it. `owned` are the addresses of storages that belong to the caller
    (parameters, the batch) and not to the stage. Unless `fresh_gradients`, parameters already have a gradient when the
    backward runs, as they do if gradients are kept between steps. `output_held` says that the caller keeps the output
    until the backward is done, which is so for the last stage. `carried` are the positions, among the output's tensors,
    of those that are kept beside the chain: they count neither as |a_{i+1}| nor as saved, only as in memory while the
    stage runs. `silent` are the positions of those that get no gradient although they could. `arriving` are the layouts
    of the gradients that the backward is given for the output's tensors. `stepped` says which parameters the backward
    steps.
    """

    device: torch.device
    input_bytes: int
    owned: Sequence[int] = ()
    fresh_gradients: bool = False
    output_held: bool = False
    carried: Sequence[int] = ()
    silent: Sequence[int] = ()
    arriving: Layouts = ()
    stepped: Stepped = ()
