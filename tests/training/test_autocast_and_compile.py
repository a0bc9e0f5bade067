"""Autocast, GradScaler, models of low precision, and torch.compile around a plan, inside one, and on its layers."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable
from rotor_solver import store_all
from tests.checkpointable.steps import CPU, Tower, planned_at, square, step_peak
from tests.fields import logged
from tests.training.loop import planned

F = nn.functional
bfloat16, float16 = (partial(torch.autocast, "cpu", dtype) for dtype in (torch.bfloat16, torch.float16))
tower = partial(Tower, 32, 5, 0.1)


def chain() -> nn.Module:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 96), nn.BatchNorm1d(96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 32))

    return nn.Sequential(*(layer() for _ in range(5)))


class Inside(Tower):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with bfloat16():
            value = super().forward(value)
        return super().forward(value.float())


class Entering(nn.Sequential):
    """A layer of a chain that enters autocast by itself."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with bfloat16():
            return super().forward(value).float()


class Shared(nn.Linear):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            value = value + F.gelu(super().forward(value))
        return value


def batch(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(0)).to(dtype)


def trained(model: nn.Module, region: Callable[[], Any], dtype: torch.dtype, scaled: bool) -> dict[str, torch.Tensor]:
    """All numbers of three steps; with a scaler, the second of them overflows and is left out."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    numbers: dict[str, torch.Tensor] = {}
    for step in range(3):
        optimizer.zero_grad()
        with region():
            value = square(model(batch(dtype)))
        scaler.scale(value * (float("inf") if scaled and step == 1 else 1.0)).backward()
        numbers |= {f"gradient {step} {name}": each.grad.clone() for name, each in model.named_parameters()}
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        numbers |= {f"loss {step}": value.detach(), f"scale {step}": torch.tensor(scaler.get_scale())}
    return {**numbers, **model.state_dict(), "random": torch.get_rng_state()}


@pytest.mark.parametrize(
    ("make", "region", "dtype", "scaled"),
    [
        (chain, float16, torch.float32, True),
        (chain, nullcontext, torch.bfloat16, False),
        (lambda: nn.Sequential(*(Entering(*each) for each in chain().children())), nullcontext, torch.float32, False),
        (tower, bfloat16, torch.float32, False),
        (partial(Inside, 32, 5, 0.1), nullcontext, torch.float32, False),
        (partial(Shared, 32, 32), partial(bfloat16, cache_enabled=False), torch.float32, False),
    ],
)
def test_numbers_are_those_of_plain_training_inside_the_limit(make, region, dtype, scaled) -> None:
    model = make().to(dtype).train()
    with region():
        network = planned(copy.deepcopy(model), batch(dtype), 0.5)
    expected, found = trained(model, region, dtype, scaled), trained(network, region, dtype, scaled)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=0, atol=0, equal_nan=True), name
    given = batch(dtype)

    def step() -> None:
        with region():
            value = square(network(given))
        value.backward()

    present = [*network.parameters(), *network.buffers(), *(p.grad for p in network.parameters()), given]
    assert measured_peak(step, present, CPU) <= network.mem_limit


def test_a_shared_weight_in_the_cache_of_autocast_gets_a_gradient_at_least_as_exact() -> None:
    """Plain training adds the uses' gradients up in the low precision of the one cached copy; stages in full."""
    model = Shared(32, 32).train()
    with bfloat16():
        network = planned(copy.deepcopy(model), batch(torch.float32), 0.5)
    exact = copy.deepcopy(model).double()
    square(exact(batch(torch.float64))).backward()
    for each in (model, network):
        with bfloat16():
            value = square(each(batch(torch.float32)))
        value.backward()
    truth = exact.weight.grad
    errors = [(each.weight.grad.double() - truth).norm() for each in (network, model)]
    assert errors[0] <= 1.1 * errors[1]
    assert errors[0] < 0.02 * truth.norm()


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
    return planned_at(0.5, make(), BATCH).mem_limit  # halfway to storing all


@pytest.mark.parametrize(
    ("make", "way"),
    [(chain, whole), (chain, around), (tower, around), pytest.param(chain, each_layer, marks=pytest.mark.slow)],
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
