"""What steps of one network came to, and how far the numbers of two of them are apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rotor_py.trials.step import Network, TrainingStep


@dataclass(frozen=True, slots=True)
class Outcome:
    """What steps of one network need, and gradients and buffers after one of them.

    These are on the CPU: on the device they would take the room of the next network's step.
    """

    peak_bytes: int
    seconds: float
    results: list[torch.Tensor]
    buffers: int
    """how many of the results are buffers, the last ones"""
    loss: float


def measure_outcome(step: TrainingStep, network: Network) -> Outcome:
    """Take steps of `network`: one for its peak and its results, and those that are timed."""
    with step.taken(network) as peak:
        results = [tensor.detach().to("cpu", copy=True) for tensor in step.results()]
    return Outcome(peak, step.seconds(network), results, len(list(step.model.buffers())), step.last_loss)


def difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest absolute difference; infinite where a tensor is missing, or NaN on one side only."""
    if len(found) != len(expected):
        return float("inf")
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        if torch.equal(a, b) or (a.is_floating_point() and torch.equal(a.isnan(), b.isnan()) and _same(a, b)):
            continue
        distance = (a.double() - b.double()).abs().max().item()
        worst = max(worst, distance if distance == distance else float("inf"))  # NaN: a number on one side only
    return worst


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())
