"""What convolutions take beside their inputs and outputs, as Inductor runs them: with channels last."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache

from rotor_py import memory_budget
from tests.compile.partition.compiled_steps import Loss, take_step

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def deep(*before: nn.Module) -> nn.Module:
    """As at the bottom of a U-Net: weights that are much larger than images."""
    return nn.Sequential(*before, *(nn.Conv2d(128, 128, 3, padding=1, bias=False) for _ in range(2)))


@pytest.mark.slow
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


class Depthwise(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.apart = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.up, self.down = nn.Conv2d(channels, 4 * channels, 1), nn.Conv2d(4 * channels, channels, 1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        inside: torch.Tensor = self.down(nn.functional.gelu(self.up(self.apart(value))))
        return value + inside


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["1GB", "9MB"])
def test_so_it_is_where_channels_are_convolved_apart(budget: str) -> None:
    # Within 9 MB, no convolution may run again: the library would then take 5 MB to convolve channels apart.
    torch._dynamo.reset()
    model = Loss(nn.Sequential(nn.Conv2d(8, 128, 1), *(Depthwise(128) for _ in range(3))))
    options = memory_budget(budget).options
    with fresh_cache():
        step = take_step(model, torch.compile(model, options=options), torch.randn(4, 8, 8, 8))
    (weight,) = options["custom_partitioner_fn"].chosen.values()
    assert 0.85 * weight.peak < step.peak < 1.02 * weight.peak
