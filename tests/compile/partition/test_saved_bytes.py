"""What Inductor saves of convolutions, and what they take beside inputs and outputs, is what the joint graph shows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

from rotor_profiling.storage import storage_bytes
from rotor_py import memory_budget
from rotor_py.compile.partitioner import SavedInputs, saving_inputs
from rotor_py.compile.stage_code import compile_code
from tests.compile.partition.compiled_steps import Loss, take_step

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class UpAndDown(nn.Sequential):
    """Convolutions, batch norms, ReLUs, a pooling and two ways up again."""

    def __init__(self) -> None:
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

        up = nn.Upsample(scale_factor=2), nn.ConvTranspose2d(16, 8, 2, stride=2)
        super().__init__(*block(3, 16), nn.MaxPool2d(2), *up)


def saved_bytes(made: torch.Tensor, *given: torch.Tensor) -> int:
    """The bytes that the node of compiled code holds beside what it was given, and what it has made."""
    node: Any = made.grad_fn
    held = {tensor.untyped_storage()._cdata for tensor in (*given, made)}
    return storage_bytes([each for each in node.saved_tensors if each.untyped_storage()._cdata not in held])


@pytest.mark.slow
def test_what_a_partition_saves_is_known_from_its_graph() -> None:
    torch._dynamo.reset()
    model, value = UpAndDown(), torch.randn(2, 3, 16, 16)
    options = memory_budget("1GB").options
    with fresh_cache():  # a graph that Inductor finds on disk is not divided again
        output = torch.compile(model, options=options)(value)
    (weight,) = options["custom_partitioner_fn"].chosen.values()
    assert weight.saved
    assert saved_bytes(output, *model.parameters(), *model.buffers(), value) == weight.saved


def test_a_compiled_stage_saves_its_weights_and_no_copies() -> None:
    stage, value = nn.Conv2d(16, 16, 3), torch.randn(1, 16, 5, 5)
    made = compile_code(stage, value, [True], ()).run(stage, value.requires_grad_())
    assert saved_bytes(made, *stage.parameters(), value) == 0


def test_other_passes_over_graphs_run_before() -> None:
    class Other(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None: ...

        def uuid(self) -> None: ...

    other, name = Other(), "post_grad_custom_post_pass"
    for given in (other, [other]):
        once = saving_inputs({name: given})
        for options in (once, saving_inputs(once)):
            first, second = options[name]
            assert first is other
            assert isinstance(second, SavedInputs)


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
