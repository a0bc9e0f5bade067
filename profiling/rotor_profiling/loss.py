"""Measure a loss: seconds of forward and backward together, and bytes beyond the gradient of the model's output."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from rotor_profiling.backends import memory_meter, stopwatch
from rotor_profiling.isolate import RandomState, set_meanwhile, undoing
from rotor_profiling.stage.gradients import gradients_at, leaves_behind, leaves_of
from rotor_profiling.storage import tensors_in, wait_for
from rotor_profiling.timing import seconds_of
from rotor_solver.described_error import DescribedError


class UnusableLossError(DescribedError, ValueError):
    """Raised if the loss function takes other arguments, or does not return a scalar that requires a gradient."""


@dataclass(frozen=True, slots=True)
class LossCost:
    """Seconds of a loss, its peak bytes (`temp_bytes`), and bytes of its value and first gradient (`kept_bytes`)."""

    seconds: float
    temp_bytes: int
    kept_bytes: int


def has_loss(output: Any) -> bool:
    """Return whether the model's `output` contains a loss: a scalar that requires a gradient."""
    return any(tensor.dim() == 0 and tensor.requires_grad for tensor in tensors_in(output))


def measure_loss(
    loss: Callable[[Any], torch.Tensor], output: Any, *, device: torch.device, output_bytes: int
) -> LossCost:
    """Measure `loss` on `output`, the model's output, whose tensors have `requires_grad` as in training.

    Raises UnusableLossError if `loss` does not take one argument, or returns no scalar that requires a gradient.
    """
    _refuse_other_arguments(loss)
    with undoing() as undo, torch.enable_grad():
        undo.append(RandomState.now((device,)).restore)
        value = loss(leaves_of(output))  # also a warm-up, in which libraries allocate memory that they keep
        _check(value)
        trained = [(each, _without_user(each)) for each in leaves_behind([get_gradient_edge(value)])]
        del value
        with set_meanwhile(*trained), memory_meter(device) as meter:
            leaf = leaves_of(output)
            meter.mark("loss")
            value = loss(leaf)
            value.backward()
            wait_for(gradients_at(leaf))
            # In training, `backward` keeps its first gradient, a tensor of ones, until the model's backward ends.
            # Here, `backward` has ended, so measure the bytes of that gradient separately.
            meter.mark("start of a backward")
            first_gradient = torch.ones_like(value)
            meter.mark("end")  # the frees of the next line count in no phase that is read
            del value, leaf, first_gradient

        def run() -> None:
            leaf = leaves_of(output)
            loss(leaf).backward()
            wait_for(gradients_at(leaf))

        with set_meanwhile(*trained), stopwatch(device) as watch:
            seconds = seconds_of(run, watch)
    phase, start = meter.phases["loss"], meter.phases["start of a backward"]
    # The gradient of the output is in memory with the loss, but the solver counts it separately, as δ_L.
    return LossCost(
        seconds=seconds,
        temp_bytes=max(0, phase.rise - output_bytes),
        kept_bytes=max(0, phase.kept - output_bytes) + start.kept,
    )


def _without_user(leaf: torch.Tensor) -> dict[str, Any]:
    """Return attributes with which backwards of `leaf` neither change the user's gradient nor call the user's hooks."""
    gradient = None if leaf.grad is None else torch.zeros_like(leaf.grad)
    return {"grad": gradient, "_backward_hooks": None, "_post_accumulate_grad_hooks": None}


def _refuse_other_arguments(loss: Callable[..., Any]) -> None:
    try:
        inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).bind(None)
    except TypeError as error:
        name = getattr(loss, "__name__", type(loss).__name__)
        message = (
            f"loss must be a function of the output, like lambda output: criterion(output, target), got {name}: {error}"
        )
        raise UnusableLossError(message, kind="loss_signature", name=name) from None
    except ValueError:  # some C functions have no signature
        pass


def _check(value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        found = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        message = f"the loss must be a tensor with a single number, got {found}; reduce it with mean() or sum()"
        raise UnusableLossError(message, kind="loss_not_a_number")
    if not value.requires_grad:
        message = "the loss does not depend on the model's output, so there is nothing to train"
        raise UnusableLossError(message, kind="no_gradient")
