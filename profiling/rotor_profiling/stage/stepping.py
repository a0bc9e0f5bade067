"""A stand-in for an optimizer that steps parameters in the backward: it takes the memory of a step, and no more.

Each parameter is stepped as soon as its gradient is whole, and the gradient is freed. So a backward holds fewer
gradients than it makes, and needs what the step of a parameter needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from rotor_profiling.storage import bytes_like

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
