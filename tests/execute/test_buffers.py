"""Buffers that a functional call moves without a trace in their version."""

from __future__ import annotations

import copy

import torch
from torch import nn

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
