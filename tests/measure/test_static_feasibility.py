"""What cannot fit is said before anything is run, and nothing that fits is refused."""

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rotor_py import Checkpointable, InfeasibleError, estimate
from rotor_py.estimation.simulated_target import world_of
from tests.fields import logged, raises

WIDTH = 128


class Unused(nn.Linear):
    """Nothing may run it."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a stage was run")


def unused() -> nn.Module:
    return nn.Sequential(*(Unused(WIDTH, WIDTH) for _ in range(4)))


PARAMETERS = 4 * (WIDTH * WIDTH + WIDTH) * 4
BATCH = 16 * WIDTH * 4


@pytest.mark.parametrize(
    ("fresh", "parts", "least"),
    [
        (False, ("264 kB parameters", "264 kB gradients", "528 kB optimizer state", "8.19 kB batch"), BATCH),
        (True, ("264 kB parameters", "528 kB optimizer state", "264 kB gradients when the optimizer steps"), 0),
    ],
)
def test_the_first_step_is_refused_before_a_stage_is_run(fresh: bool, parts: tuple[str, ...], least: int) -> None:
    model = unused()
    options = {"optimizer": torch.optim.AdamW(model.parameters()), "fresh_grads": fresh, "cache": False}
    network = Checkpointable(model, mem_limit="700kB", **options)
    with raises(InfeasibleError, "limit_below_held") as caught:
        network(torch.randn(16, WIDTH))
    least += 4 * PARAMETERS + 8 * 4  # and a count of steps for each of eight parameters
    assert caught.value.min_bytes == least
    assert caught.value.mem_limit == 700_000
    assert all(part in str(caught.value) for part in (*parts, f"({least} bytes)", "700 kB", "out of memory"))
    assert network.budget is None
    with raises(InfeasibleError, "limit_below_held"):  # at once, if it is made with its input and limit
        Checkpointable(unused(), torch.randn(16, WIDTH), mem_limit="100kB")


def test_a_model_larger_than_the_device_is_refused_without_a_limit_and_of_several_each_holds_its_part() -> None:
    def large() -> nn.Module:
        return nn.Sequential(*(Unused(2**17, 2**17, dtype=torch.bfloat16) for _ in range(3)))  # 103 GB

    with raises(InfeasibleError, "limit_below_held") as caught:
        estimate(large, torch.empty(8, 2**17, dtype=torch.bfloat16, device="meta"), "h100", fresh_grads=True)
    assert caught.value.numbers["min_bytes"] >= 3 * 2**35

    def made() -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    batch = torch.randn(4, WIDTH)
    with raises(InfeasibleError, "limit_below_held", mem_limit=200_000) as caught:
        estimate(made, batch, "h100:2", loss=torch.mean, mem_limit="200kB")
    assert caught.value.numbers["min_bytes"] >= 2 * 133_000  # half of the parameters, and of their gradients
    assert estimate(made, batch, "h100:8", loss=torch.mean, mem_limit="67.8MB").fits  # 67.1 MB are for cuBLAS


def test_one_of_several_processes_goes_on_and_is_warned(caplog: pytest.LogCaptureFixture) -> None:
    """Others may measure, and wait for it."""
    with world_of(2), caplog.at_level(logging.WARNING, "rotor_py"):
        network = Checkpointable(unused(), mem_limit="100kB", process_group=dist.group.WORLD)
        network.refuse_what_cannot_fit(torch.randn(16, WIDTH))
    assert logged(caplog, "limit_below_held")


def tied() -> nn.Module:
    """Its first layer is frozen, and its second and third share a weight."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)), nn.BatchNorm1d(64), nn.Linear(64, 8))
    model[0].requires_grad_(False)
    model[2].weight = model[1].weight
    return model


FRESH = {"fresh_grads": True}
HOW = [("optimizer", {}), ("optimizer", FRESH), ("step_in_backward", FRESH), ("optimizer", {"forwards_in_flight": 2})]


@pytest.mark.parametrize(("role", "how"), HOW)
def test_nothing_is_refused_that_a_plan_fits(role: str, how: dict[str, Any]) -> None:
    model, value = tied(), torch.randn(16, 64)
    optimizer = torch.optim.Adam(each for each in model.parameters() if each.requires_grad)
    network = Checkpointable(model, value, loss=torch.mean, cache=False, **how, **{role: optimizer})
    least = network.budget.least_bytes()
    network.mem_limit = least
    network.refuse_what_cannot_fit(value)
    network.compute_sequence()
    network.mem_limit = 1
    with pytest.raises(InfeasibleError) as caught:
        network.refuse_what_cannot_fit(value)
    assert least / 3 < caught.value.min_bytes <= least
