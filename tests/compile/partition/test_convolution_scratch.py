"""What convolutions take beside their inputs and outputs, as Inductor runs them: with channels last."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache

from rotor_py import memory_budget
from tests.compile.partition.compiled_steps import Loss, take_step

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class Depthwise(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.apart = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.up, self.down = nn.Conv2d(channels, 4 * channels, 1), nn.Conv2d(4 * channels, channels, 1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        inside: torch.Tensor = self.down(nn.functional.gelu(self.up(self.apart(value))))
        return value + inside


def deep() -> nn.Module:
    """As at the bottom of a U-Net: weights that are much larger than images."""
    return nn.Sequential(*(nn.Conv2d(128, 128, 3, padding=1, bias=False) for _ in range(2)))


def apart() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 128, 1), *(Depthwise(128) for _ in range(3)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "shape", "budget", "least"),
    [
        (deep, (2, 128, 4, 4), "1GB", 1.0),
        # Within 9 MB, no convolution may run again: the library would then take 5 MB to convolve channels apart.
        (apart, (4, 8, 8, 8), "9MB", 0.85),
    ],
)
def test_the_peak_of_convolutions_under_inductor_is_known_from_the_graph(
    made: Callable[[], nn.Module], shape: tuple[int, ...], budget: str, least: float
) -> None:
    torch._dynamo.reset()
    model = Loss(made())
    options = memory_budget(budget).options
    with fresh_cache():  # a graph that Inductor finds on disk is not divided again
        step = take_step(model, torch.compile(model, options=options), torch.randn(shape))
    (weight,) = options["custom_partitioner_fn"].chosen.values()
    assert least * weight.peak <= step.peak <= 1.02 * weight.peak
