"""What convolutions take beside their inputs and outputs, as Inductor runs them: with channels last."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache

from rotor_py import memory_budget
from tests.partition.compiled_steps import Loss, take_step

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def deep(*before: nn.Module) -> nn.Module:
    """As at the bottom of a U-Net: weights that are much larger than images."""
    return nn.Sequential(*before, *(nn.Conv2d(128, 128, 3, padding=1, bias=False) for _ in range(2)))


@pytest.mark.parametrize("before", [True, False])
def test_the_peak_of_convolutions_under_inductor_is_known_from_the_graph(before: bool) -> None:
    torch._dynamo.reset()
    model = Loss(deep(nn.Conv2d(8, 128, 1)) if before else deep())
    value = torch.randn(2, 8 if before else 128, 4, 4)
    options = memory_budget("1GB").options
    with fresh_cache():  # a graph that Inductor finds on disk is not divided again
        step = take_step(model, torch.compile(model, options=options), value)
    (weight,) = options["custom_partitioner_fn"].chosen.values()
    assert step.peak == weight.peak
