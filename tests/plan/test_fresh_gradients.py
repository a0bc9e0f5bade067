"""A step that no plan fits while gradients are kept: the refusal says what it takes where the loop frees them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, InfeasibleError, estimate
from tests.cli.conftest import model_file, plan  # noqa: F401  # fixtures
from tests.fields import raises

WIDTH, BATCH = 256, torch.randn(512, 256)
WORKSPACE = 2 * 32 * 2**20
"""Of cuBLAS, on a device that is not here."""


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 1024), nn.GELU(), nn.Linear(1024, WIDTH)) for _ in range(4)))


def here(limit: int, *, fresh: bool = False) -> None:
    Checkpointable(blocks(), BATCH, limit, loss=torch.mean, fresh_grads=fresh)


def there(limit: int, *, fresh: bool = False) -> None:
    estimate(blocks, BATCH, "h100", loss=torch.mean, mem_limit=WORKSPACE + limit, fresh_grads=fresh)


def refusal(planned: Callable[..., None], limit: int, **options: Any) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        planned(limit, **options)
    return caught.value


@pytest.mark.parametrize("planned", [here, there])
def test_the_number_is_the_least_limit_of_a_plan_with_fresh_gradients(planned: Callable[..., None]) -> None:
    said = re.search(r"the least limit is \S+ MB \((\d+) bytes\), and a plan fits", str(refusal(planned, 24_000_000)))
    assert said is not None
    assert int(said[1]) == refusal(planned, 20_000_000, fresh=True).min_bytes
    planned(24_000_000, fresh=True)


@pytest.mark.parametrize("planned", [here, there])
def test_where_that_does_not_fit_either_it_says_so(planned: Callable[..., None]) -> None:
    error = refusal(planned, 20_000_000)
    assert "still above the limit" in str(error)
    assert " Try a smaller batch, or a limit of " in str(error)
    assert f"({refusal(planned, 20_000_000, fresh=True).min_bytes} bytes), still above" in str(error)


def test_of_gradients_that_are_freed_already_nothing_is_said() -> None:
    assert "frees gradients" not in str(refusal(here, 20_000_000, fresh=True))


def test_nor_where_several_forwards_are_in_flight_which_need_them_in_any_case() -> None:
    with pytest.raises(InfeasibleError) as caught:
        Checkpointable(blocks(), BATCH, 24_000_000, loss=torch.mean, forwards_in_flight=2)
    assert "frees gradients" not in str(caught.value)


def test_before_measuring_only_where_what_is_known_would_fit() -> None:
    """With all gradients there when the optimizer steps, only the batch may be gone."""
    model = blocks()
    held = 4 * sum(each.numel() for each in model.parameters()) * 4
    for limit, told in ((held + 100_000, True), (held - 100_000, False)):
        network = Checkpointable(model, mem_limit=limit, optimizer=torch.optim.AdamW(model.parameters()))
        with raises(InfeasibleError, "limit_below_held") as caught:
            network(BATCH)
        assert ("frees gradients" in str(caught.value)) == told


MODEL = """
import torch
from torch import nn

model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)))
sample = torch.randn(512, 256)
loss = torch.mean
"""


@pytest.mark.parametrize(
    "options", [("24MB",), (str(24_000_000 + WORKSPACE), "--device", "h100")], ids=["here", "there"]
)
def test_the_command_says_what_to_add_and_then_plans(plan: Any, model_file: Any, options: tuple[str, ...]) -> None:  # noqa: F811  # fixtures
    refused = plan(model_file(MODEL), "--mem-limit", *options)
    assert refused.exit_code == 3
    assert "(--fresh-grads) the least limit is" in refused.stderr
    assert plan(model_file(MODEL), "--mem-limit", *options, "--fresh-grads").exit_code == 0
