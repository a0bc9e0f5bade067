"""A stage that is run again right before its backward does not compute what only its output needs."""

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from rotor_profiling import measured_peak
from rotor_py import Checkpointable, CheckpointOptim
from rotor_py.stage.skipped_output import forward_skipping_output
from rotor_solver import Sequence, recompute_all
from tests.capture.test_partial_saving import Stack
from tests.checkpointable.steps import square
from tests.execute.training import assert_same, cut_of, replayed, steps
from tests.solver.strategies import unit_chain

F = nn.functional
PRODUCTS = {f"aten.{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "convolution")}


class Products(TorchDispatchMode):
    """Counts the products of matrices, and the convolutions, that are really computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += str(func.overloadpacket) in PRODUCTS and args[0].device.type != "meta"
        return func(*args, **(kwargs or {}))


SKIPPING: dict[str, Callable[[], tuple[nn.Module, ...]]] = {
    "linear": lambda: (nn.Tanh(), nn.Linear(6, 5)),
    "without bias": lambda: (nn.Tanh(), nn.Linear(6, 5, bias=False)),
    "dropped": lambda: (nn.Sigmoid(), nn.Sequential(nn.Linear(6, 5), nn.Identity()), nn.Dropout(0.4)),
    "convolution": lambda: (nn.Tanh(), nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Flatten()),
    "transposed": lambda: (nn.Tanh(), nn.ConvTranspose1d(3, 4, 3, stride=2)),
    "alone": lambda: (nn.Linear(6, 5),),
}
SAMPLES = {"without bias": (4, 3, 6), "convolution": (2, 3, 8, 8), "transposed": (2, 3, 8)}


@pytest.mark.parametrize("name", SKIPPING)
def test_numbers_are_those_of_plain_training_without_the_last_product(name: str) -> None:
    layers, sample = SKIPPING[name](), torch.randn(SAMPLES.get(name, (9, 6)))
    stage = nn.Sequential(*layers) if len(layers) > 1 else layers[0]
    if name == "convolution":
        sample = sample.to(memory_format=torch.channels_last)
    run = forward_skipping_output(stage)
    with Products() as whole:
        expected = stage(sample)
    with Products() as part:
        output = run(sample)
    assert (whole.count, part.count) == (1, 0)
    assert (output.shape, output.stride(), output.dtype) == (expected.shape, expected.stride(), expected.dtype)
    model = nn.Sequential(nn.Identity(), stage, nn.Tanh(), nn.Linear(expected.shape[-1], 2))
    sample.requires_grad_()
    sequence, names = recompute_all(unit_chain(len(model))), tuple(map(str, range(len(model))))
    for region in (None, torch.autocast("cpu", torch.bfloat16)):
        twin, trained = copy.deepcopy(model), copy.deepcopy(model)
        forward = lambda value: CheckpointOptim.apply(tuple(trained), sequence, names, True, value)  # noqa: B023, E731
        assert_same(steps(trained, forward, sample, region), steps(twin, twin, sample, region))


def test_skipping_takes_no_more_memory_than_computing() -> None:
    layer, sample = nn.Linear(6, 50), torch.randn(9, 40, 6).transpose(0, 1)
    run = forward_skipping_output(layer)
    whole = measured_peak(lambda: layer(sample), [], torch.device("cpu"))
    assert measured_peak(lambda: run(sample), [], torch.device("cpu")) <= whole


class Own(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).exp()  # its backward needs what it returns


def hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_forward_hook(lambda _, __, output: output.exp())
    return layer


def test_nothing_is_skipped_where_somebody_may_look_at_it() -> None:
    for last in (nn.ReLU(), nn.Dropout(0.5, inplace=True), nn.LayerNorm(4), hooked()):
        assert forward_skipping_output(nn.Sequential(nn.Linear(4, 4), last)) is None
    for stage in (Own(4, 4), nn.Identity(), nn.Sequential(), torch.tanh):
        assert forward_skipping_output(stage) is None


def test_what_is_stored_on_the_way_back_is_computed() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5))
    sample = torch.randn(3, 5, requires_grad=True)
    sequence = Sequence.parse("CF_0, Fn_1, Fn_2, Fe_3, L, B_3, Fe_0, Fe_1, Fe_2, B_2, B_1, B_0")
    found, twin = cut_of(model, sample), copy.deepcopy(model)
    with Products() as counted:
        output = replayed(found, sequence)(sample)
        forward = counted.count
        output.sum().backward()
    assert counted.count - forward == 2 + 4 * 2
    twin(sample).sum().backward()
    assert all(map(torch.equal, *([p.grad for p in each.parameters()] for each in (model, twin))))


class Block(nn.Module):
    def __init__(self, ending: str) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)
        self.ending = ending

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        inner = self.narrow(F.gelu(self.wide(self.norm(value))))
        match self.ending:
            case "dropout":
                return value + F.dropout(inner, 0.3, self.training)
            case "matmul":
                return value + (inner.view(-1, 4, 8) @ self.narrow.weight[:, :8]).reshape(-1, 8)
            case "in place":
                inner += value
                return inner
            case "square":
                return value + inner.square()
        raise AssertionError


@cache
def captured() -> Checkpointable:
    """Blocks with each ending; measured, for as many recomputations as there can be."""
    blocks = Stack(*map(Block, ("dropout", "dropout", "matmul", "in place", "square")))
    nn.init.ones_(blocks.layers[1].wide.weight)
    planned = Checkpointable(blocks, loss=square, granularity=5)
    planned.measure(torch.randn(64, 8, requires_grad=True))
    planned.compute_sequence(planned.budget.least_bytes())
    return planned


def test_captured_stages_skip_what_goes_into_their_output_alone() -> None:
    planned, batch = captured(), torch.randn(64, 8, requires_grad=True)
    plain, stages = copy.deepcopy(planned.model), planned.functions[1:]  # the first may end inside a block
    assert [forward_skipping_output(function) is not None for function in stages] == [True, True, False, False]
    found = []
    for network in (planned, plain):
        torch.manual_seed(3)
        output = network(batch)
        batch.grad = None
        square(output).backward()
        found.append([output, batch.grad, torch.get_rng_state(), *(p.grad for p in network.parameters())])
    assert all(map(torch.equal, *found))


def test_an_error_in_what_is_left_of_a_captured_stage_names_its_line() -> None:
    planned = captured()
    output = planned(torch.randn(64, 8, requires_grad=True))
    weight = planned.model.layers[1].wide.weight
    whole = weight.data
    weight.data = whole.view(-1)[:8].view(1, 8)  # no other address, and all values are the same
    with pytest.raises(RuntimeError) as caught:
        square(output).backward()
    weight.data = whole
    notes = "\n".join(caught.value.__notes__)
    assert "in the recomputation of stage 'layers." in notes
    assert "self.wide(self.norm(value))" in notes
