"""torch.compile around a plan, inside one, and on the layers of a planned chain."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_solver import store_all
from tests.checkpointable.steps import between, square, step_peak
from tests.fields import logged
from tests.training.test_mixed_precision import batch, chain, tower, trained

BATCH = batch(torch.float32)


def compiled(model: Any) -> Any:
    return torch.compile(model, backend="aot_eager")


def whole(model: nn.Module, limit: int) -> nn.Module:
    return Checkpointable(compiled(model), mem_limit=limit, loss=square)


def around(model: nn.Module, limit: int) -> nn.Module:
    return compiled(Checkpointable(model, mem_limit=limit, loss=square))


def each_layer(model: nn.Module, limit: int) -> nn.Module:
    for layer in model.children():
        layer.compile(backend="aot_eager")
    return Checkpointable(model, mem_limit=limit, loss=square)


@cache
def limit_of(make: Callable[[], nn.Module]) -> int:
    """Halfway to storing all."""
    probe = Checkpointable(make(), loss=square)
    probe.measure(BATCH)
    return between(probe, 0.5)


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (chain, whole),
        (chain, around),
        (tower, around),
        pytest.param(tower, whole, marks=pytest.mark.slow),
        pytest.param(chain, each_layer, marks=pytest.mark.slow),
    ],
)
def test_the_plan_is_followed_with_the_numbers_of_plain_training(make, way) -> None:
    model, limit = make(), limit_of(make)
    planned = way(copy.deepcopy(model), limit)
    found, expected = (trained(each, nullcontext, torch.float32, scaled=False) for each in (planned, model))
    assert len(found) == len(expected)
    assert all(map(torch.equal, found.values(), expected.values()))  # compiled, all have other names
    inner: Any = getattr(planned, "_orig_mod", planned) if way is around else planned
    assert inner.sequence != store_all(inner.budget.chain)
    assert step_peak(planned, BATCH) <= limit


def test_a_model_compiled_as_a_whole_is_mentioned_and_keeps_its_keys(caplog: pytest.LogCaptureFixture) -> None:
    model = compiled(nn.Sequential(nn.Linear(2, 2)))
    assert list(Checkpointable(model).state_dict()) == list(model.state_dict())
    assert logged(caplog, "compile_ignored")


def curve(x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = x.tanh().sin()
    return x


class Broken(nn.Module):
    """Its graph breaks inside a loop, so that TorchDynamo compiles `curve` by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1):
            torch._dynamo.graph_break()
            x = curve(x)
        return x


def test_a_compiled_function_may_come_upon_code_that_was_captured() -> None:
    """A function with as many versions as it may have runs what TorchDynamo cached for the functions it calls."""
    batch = torch.randn(8, 16, requires_grad=True)
    network = Checkpointable(Broken(), batch, mem_limit="1GB", loss=square)
    square(network(batch)).backward()
    with torch._dynamo.config.patch(recompile_limit=1):
        compiled = torch.compile(lambda x, factor: factor * curve(x), backend="eager", dynamic=False)
        for factor in (2.0, 3.0):
            assert torch.equal(compiled(batch, factor), factor * curve(batch))
