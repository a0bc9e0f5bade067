"""What Inductor's forward saves, in bytes, is what the joint graph shows: networks of convolutions, in any layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

from rotor_profiling.storage import storage_bytes
from rotor_py import memory_budget
from rotor_py.compile.partitioner import SavedInputs, saving_inputs
from rotor_py.compile.stage_code import compile_code

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


class UpAndDown(nn.Sequential):
    """Convolutions, batch norms, ReLUs, a pooling and two ways up again."""

    def __init__(self) -> None:
        def block(inputs: int, outputs: int) -> list[nn.Module]:
            return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]

        up = nn.Upsample(scale_factor=2), nn.ConvTranspose2d(16, 8, 2, stride=2)
        super().__init__(*block(3, 16), nn.MaxPool2d(2), *up)


class ChannelsLastNorm(nn.Module):
    """A block of a ConvNeXt, and an image cut into patches for it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, stride=4)
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, picture: torch.Tensor) -> torch.Tensor:
        value = self.patches(picture)
        inside = self.norm(self.depthwise(value).permute(0, 2, 3, 1))
        return value + self.narrow(F.gelu(self.wide(inside))).permute(0, 3, 1, 2)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "up and down": (UpAndDown, (2, 3, 16, 16)),
    "channels last norm": (ChannelsLastNorm, (2, 3, 32, 32)),
}


def saved_bytes(made: torch.Tensor, *given: torch.Tensor) -> int:
    """The bytes that the node of compiled code holds beside what it was given, and what it has made."""
    node: Any = made.grad_fn
    held = {tensor.untyped_storage()._cdata for tensor in (*given, made)}
    return storage_bytes([each for each in node.saved_tensors if each.untyped_storage()._cdata not in held])


@pytest.mark.parametrize(
    "name", [name if name == "up and down" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_what_a_partition_saves_is_known_from_its_graph(name: str) -> None:
    torch._dynamo.reset()
    made, shape = MODELS[name]
    model, value = made(), torch.randn(shape)
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
