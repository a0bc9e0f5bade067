"""Buffers that a functional call moves without a trace in their version."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from rotor_profiling import memory_meter
from rotor_py import CheckpointOptim


class Normalised(nn.Module):
    """Batch normalisation by hand: no nn.BatchNorm that could be recognised."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(value, self.mean, self.variance, self.weight, training=True).sin()


def test_statistics_of_a_functional_batch_norm_move_once_in_every_step() -> None:
    model = nn.Sequential(*(Normalised() for _ in range(3)))
    plain, value = copy.deepcopy(model), torch.randn(4, 8, requires_grad=True)
    for _ in range(3):
        plain(value).sum().backward()
        sequence = "CF_0, Fn_1, Fe_2, L, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"
        CheckpointOptim.apply(list(model), sequence, ["0", "1", "2"], True, value).sum().backward()
        for found, expected in zip(model.buffers(), plain.buffers(), strict=True):
            assert torch.equal(found, expected)


class Counting(nn.Module):
    """A large buffer that moves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8))
        self.register_buffer("seen", torch.zeros(100_000))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return (value * self.weight * self.seen[0]).sin()


@pytest.mark.parametrize("retained", [False, True])
def test_after_the_backward_an_output_that_is_held_holds_no_copies_of_buffers(retained: bool) -> None:
    model, value = nn.Sequential(*(Counting() for _ in range(3))), torch.randn(4, 8, requires_grad=True)
    sequence = "CF_0, Fn_1, Fe_2, L, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"
    for _ in range(2):  # in the first, the copies are there to find out which buffers move
        with memory_meter(torch.device("cpu")) as meter:
            output = CheckpointOptim.apply(list(model), sequence, ["0", "1", "2"], True, value)
            output.sum().backward(retain_graph=retained)
            meter.mark("held")
        assert (meter.phases["held"].start > 100_000) == retained
        if retained:
            output.sum().backward()
        del output
