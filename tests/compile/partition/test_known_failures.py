"""Two failures of the ratio `activation_memory_budget` in torch 2.13, and what a budget in bytes does instead.

pytorch/pytorch#197838: less budget, more memory. pytorch/pytorch#197871: a solver that exceeds its own capacity.
"""

import pytest
import torch
from torch import nn
from torch._functorch._activation_checkpointing.knapsack import dp_knapsack, dp_knapsack_sliding_hirschberg

from tests.compile.partition.compiled_steps import Block, compiled_step, seen_candidates

LAYERS, SHAPE = 4, (1, 64, 16)


def blocks() -> nn.Module:
    return nn.Sequential(*(Block(SHAPE[-1]) for _ in range(LAYERS)))


def ratio_peak(ratio: float, value: torch.Tensor) -> int:
    with torch._functorch.config.patch(activation_memory_budget=ratio):
        return compiled_step(blocks, value).peak


@pytest.mark.slow
def test_with_a_ratio_less_budget_takes_more_memory_and_with_bytes_it_never_does(monkeypatch) -> None:
    value = torch.randn(SHAPE)
    with seen_candidates(monkeypatch) as found:
        compiled_step(blocks, value, 10**12)
    low, middle = ratio_peak(0.02, value), ratio_peak(0.1, value)
    assert low > middle, "torch has mended it: the page on memory budgets says otherwise"
    least = found[0][0].weight.peak
    assert least <= middle
    assert compiled_step(blocks, value, middle).peak <= middle
    assert compiled_step(blocks, value, least).peak <= least


def test_one_of_torchs_solvers_exceeds_its_own_capacity() -> None:
    unit = 1e-4  # what the solvers divide memory into: all sizes are exact
    sizes, seconds = [unit] * 3, [1.0] * 3
    assert len(dp_knapsack(sizes, seconds, unit)[1]) == 1
    assert len(dp_knapsack_sliding_hirschberg(sizes, seconds, unit)[1]) == 2, "torch has mended it"
