"""Inputs of measuring: the executor's runner of a stage, the stage's position in a chain, and stepped parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from rotor_profiling.stage.gradients import Layouts
from rotor_profiling.storage import bytes_like

# Protocols of the executor.
#
# Measuring calls the executor's own code, so it measures exactly the runs of training. The executor is above this
# package, so this file only declares its interface.


class Attached(Protocol):
    """A recomputed stage with a graph of its own."""

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the input's tensors, then of the parameters, for those of the outputs."""


class Runner(Protocol):
    """Runs a stage in each way that the executor does."""

    function: Callable[..., Any]

    @property
    def can_skip_output(self) -> bool:
        """Whether the stage has a different run that skips its output."""

    def make_ready(self) -> None:
        """Do one-time work of a run in advance, so that it is not timed."""

    def forward(self, value: Any, *, skip_output: bool = False) -> Any:
        """Run the stage in the surrounding graph; with `skip_output`, the output has no values."""

    def first(self, value: Any) -> tuple[Any, Any]:
        """Run it without a graph; return its output, and the state for recomputing it."""

    def before_first(self, value: Any) -> tuple[Any, int] | None:
        """Return the state for a recomputation as before a first run, and the most bytes of such a run.

        None if only a first run shows this.
        """

    def again(self, value: Any, surroundings: Any) -> Any:
        """Recompute it without a graph, exactly as in the first run."""

    def attach(self, value: Any, surroundings: Any, *, skip_output: bool = False) -> tuple[Attached, Any]:
        """Recompute it with a graph of its own, exactly as in the first run; return the graph and the output."""


# Substitute for an optimizer that steps parameters in the backward: takes the memory of a step, and no more.
#
# Each parameter is stepped as soon as its gradient is complete, and the gradient is freed. So a backward holds fewer
# gradients than it makes, and needs the memory of a parameter's step.


Stepped = tuple[int | None, ...]
"""For each trained parameter of a stage, in the order of `trained_parameters`, the bytes of its step; None if the
stage's backward does not step it."""


@contextmanager
def stand_in_steps(parameters: Sequence[torch.Tensor], stepped: Stepped) -> Iterator[None]:
    """Free gradients that a backward inside brings to `parameters`, as a step in the backward does."""
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
    """Return the bytes held when a recomputed stage's first parameter is stepped, without its input's gradient.

    Its node makes the gradients of all parameters before it hands on the first.
    """
    steps = [nbytes for nbytes in stepped if nbytes is not None]
    return bytes_like(parameters) + max(steps) if steps else 0


@dataclass(frozen=True, slots=True)
class StageContext:
    """Position of a stage in a chain.

    Attributes:
        device: The device measured.
        input_bytes: |a_i| as the chain counts it.
        owned: Addresses of storages that belong to the caller (parameters, the batch), not to the stage.
        fresh_gradients: Whether training frees gradients between steps. If not, parameters already have a gradient when
            the backward runs.
        output_held: Whether the caller keeps the output until the backward is done, as for the last stage.
        carried: Indices of output tensors kept outside the chain: they count neither as |a_{i+1}| nor as saved, only as
            in memory while the stage runs.
        silent: Indices of output tensors that could get a gradient but do not.
        arriving: Layouts of the gradients of the output's tensors.
        stepped: Which parameters the backward steps.
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
