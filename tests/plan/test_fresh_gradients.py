"""A step that no plan fits while gradients are kept: the refusal says what it takes where the loop frees them."""

import re
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, InfeasibleError
from tests.fields import raises

BATCH = torch.randn(512, 256)


def blocks() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)))


def refusal(limit: int, **options: Any) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        Checkpointable(blocks(), BATCH, limit, loss=torch.mean, **options)
    return caught.value


def test_the_number_is_the_least_limit_of_a_plan_with_fresh_gradients() -> None:
    fresh = refusal(20_000_000, fresh_grads=True)
    assert "frees gradients" not in str(fresh)
    said = re.search(r"the least limit is \S+ MB \((\d+) bytes\), and a plan fits", str(refusal(24_000_000)))
    assert int(said[1]) == fresh.min_bytes
    Checkpointable(blocks(), BATCH, 24_000_000, loss=torch.mean, fresh_grads=True)
    told = str(refusal(20_000_000))
    assert f"({fresh.min_bytes} bytes), still above the limit" in told
    assert " Try a smaller batch, or a limit of " in told
    # Several forwards need the gradients in any case.
    assert "frees gradients" not in str(refusal(24_000_000, forwards_in_flight=2))


def test_before_measuring_only_where_what_is_known_would_fit() -> None:
    """With all gradients there when the optimizer steps, only the batch may be gone."""
    model = blocks()
    held = 4 * sum(each.numel() for each in model.parameters()) * 4
    for limit, told in ((held + 100_000, True), (held - 100_000, False)):
        network = Checkpointable(model, mem_limit=limit, optimizer=torch.optim.AdamW(model.parameters()))
        with raises(InfeasibleError, "limit_below_held") as caught:
            network(BATCH)
        assert ("frees gradients" in str(caught.value)) == told
