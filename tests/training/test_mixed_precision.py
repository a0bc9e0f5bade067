"""Autocast, GradScaler and models of low precision, with a plan and without one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_py import Checkpointable
from rotor_solver import store_all

CPU = torch.device("cpu")
F = nn.functional


def chain() -> nn.Module:
    def layer() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 96), nn.BatchNorm1d(96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 32))

    return nn.Sequential(*(layer() for _ in range(5)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 32)) for _ in range(5))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = value + F.dropout(layer(value), 0.1, self.training)
        return value


class Inside(Residual):
    """Enters autocast by itself, for a part of its layers."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            value = super().forward(value)
        return super().forward(value.float())


class Entering(nn.Module):
    """A layer of a chain that enters autocast by itself."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(value).float()


def entering() -> nn.Module:
    return nn.Sequential(*(Entering(layer) for layer in chain().children()))


class Shared(nn.Module):
    """One weight used by every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            value = value + F.gelu(self.linear(value))
        return value


Region = Callable[[], AbstractContextManager[Any]]


def bfloat16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


def float16() -> torch.autocast:
    return torch.autocast("cpu", torch.float16)


def uncached() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def batch(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(256, 32, generator=torch.Generator().manual_seed(0)).to(dtype)


def trained(model: nn.Module, region: Region, dtype: torch.dtype, scaled: bool) -> dict[str, torch.Tensor]:
    """All numbers of four steps; with a scaler, the second of them overflows and is left out."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    numbers: dict[str, torch.Tensor] = {}
    for step in range(4):
        optimizer.zero_grad()
        with region():
            output = model(batch(dtype))
            value = loss(output)
        factor = float("inf") if scaled and step == 1 else 1.0
        scaler.scale(value * factor).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            numbers[f"gradient {step} {name}"] = parameter.grad.clone()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        numbers[f"loss {step}"] = value.detach()
        numbers[f"scale {step}"] = torch.tensor(scaler.get_scale())
    numbers |= {name: each.clone() for name, each in model.state_dict().items()}
    return {**numbers, "random": torch.get_rng_state()}


def planned_halfway(model: nn.Module, region: Region, dtype: torch.dtype) -> Checkpointable:
    planned = Checkpointable(model, loss=loss)
    with region():
        planned.measure(batch(dtype))
    assert planned.budget is not None
    least, most = planned.budget.least_bytes(), planned.budget.peak_bytes(store_all(planned.budget.chain))
    planned.compute_sequence((least + most) // 2)
    assert planned.sequence != store_all(planned.budget.chain)
    return planned


def refuse_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.allclose(value, other[name], rtol=0, atol=0, equal_nan=True), name


@pytest.mark.parametrize(
    ("make", "region", "dtype", "scaled"),
    [
        (chain, bfloat16, torch.float32, False),
        (chain, float16, torch.float32, True),
        (chain, nullcontext, torch.bfloat16, False),
        (entering, nullcontext, torch.float32, False),
        (Residual, bfloat16, torch.float32, False),
        (Residual, float16, torch.float32, True),
        (Residual, nullcontext, torch.bfloat16, False),
        (Inside, nullcontext, torch.float32, False),
        (Shared, uncached, torch.float32, False),
    ],
)
def test_numbers_are_those_of_plain_training_inside_the_limit(
    make: Callable[[], nn.Module], region: Region, dtype: torch.dtype, scaled: bool
) -> None:
    torch.manual_seed(0)
    model = make().to(dtype).train()
    planned = planned_halfway(copy.deepcopy(model), region, dtype)
    refuse_difference(trained(model, region, dtype, scaled), trained(planned, region, dtype, scaled))
    given = batch(dtype)

    def step() -> None:
        with region():
            value = loss(planned(given))
        value.backward()

    present = [*planned.parameters(), *planned.buffers(), *(p.grad for p in planned.parameters()), given]
    limit = planned.mem_limit
    assert isinstance(limit, int)
    assert measured_peak(step, [each for each in present if each is not None], CPU) <= limit


def test_a_shared_weight_in_the_cache_of_autocast_gets_a_gradient_at_least_as_exact() -> None:
    """Plain training adds the uses' gradients up in the low precision of the one cached copy; stages in full."""
    torch.manual_seed(0)
    model = Shared().train()
    planned = planned_halfway(copy.deepcopy(model), bfloat16, torch.float32)
    exact = copy.deepcopy(model).double()
    loss(exact(batch(torch.float64))).backward()
    for each in (model, planned):
        with bfloat16():
            value = loss(each(batch(torch.float32)))
        value.backward()
    truth = exact.linear.weight.grad
    errors = [(each.linear.weight.grad.double() - truth).norm() for each in (planned, model)]
    assert errors[0] <= 1.1 * errors[1]
    assert errors[0] < 0.02 * truth.norm()
