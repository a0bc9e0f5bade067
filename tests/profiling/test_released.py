"""What a graph holds of its input shows in twins of it as it does in a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling.stage import bytes as stage_bytes
from rotor_profiling.stage import runs
from rotor_profiling.stage.released import WatchedInput, can_be_watched
from tests.profiling.costs import BIAS, UNIT, cost, square, unit


class InTwo(nn.Module):
    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = pair
        return first, first * second


FUNCTIONS: dict[str, tuple[Callable[[], Callable[[Any], Any]], Callable[[], Any]]] = {
    "saves its input": (square, unit),
    "saves its output": (nn.Sigmoid, unit),
    "saves neither": (lambda: lambda value: value + 1, unit),
    "a view": (lambda: lambda value: value.view(-1), unit),
    "the input itself": (nn.Identity, unit),
    "hands one on": (InTwo, lambda: (unit(), unit())),
    "of one memory": (InTwo, lambda: (unit(),) * 2),
    "channels last": (
        lambda: nn.Conv2d(4, 4, 1),
        lambda: torch.randn(8, 4, 8, 8).to(memory_format=torch.channels_last).requires_grad_(),
    ),
    "sides of length one": (nn.Tanh, lambda: torch.randn(64, 1, 32)[:, :, ::2].requires_grad_()),
    "without a gradient": (square, lambda: unit(requires_grad=False)),
    "indices": (lambda: nn.Embedding(16, 64), lambda: torch.randint(16, (64, 64))),
}


@pytest.mark.parametrize("which", FUNCTIONS)
def test_bytes_are_those_that_a_copy_shows(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, value = FUNCTIONS[which]
    function, given = make(), value()
    names = list(stage_bytes.StageBytes.__dataclass_fields__)
    watched = cost(function, given)
    monkeypatch.setattr(runs, "can_be_watched", lambda value: False)
    copied = cost(function, given)
    assert [getattr(watched, name) for name in names] == [getattr(copied, name) for name in names]


def test_what_is_not_held_is_seen_and_what_is_held_is_not() -> None:
    assert cost(nn.Sigmoid(), unit()).input_released_bytes == UNIT
    assert cost(square(), unit()).input_released_bytes == 0
    assert cost(square(), unit()).output_released_bytes == UNIT
    assert cost(nn.Sigmoid(), unit()).output_released_bytes == 0


def test_a_twin_is_the_same_memory_and_takes_none() -> None:
    value = torch.randn(4, BIAS).requires_grad_()
    watched = WatchedInput(value, frozenset())
    assert watched.value.data_ptr() == value.data_ptr()
    assert watched.value.requires_grad
    assert watched.value.stride() == value.stride()
    held = watched.value.detach()
    assert watched.let_go() == 0
    del held
    assert watched.freed() == value.nbytes
    assert watched.freed() == 0


def test_only_plain_memory_is_watched() -> None:
    class Other(torch.Tensor):
        pass

    assert can_be_watched([torch.zeros(1), 2, torch.zeros(1, dtype=torch.bool)])
    assert not can_be_watched(torch.zeros(1).as_subclass(Other))
    assert not can_be_watched(torch.zeros(1, device="meta"))
    assert not can_be_watched(torch.zeros(1, dtype=torch.complex64))
    assert not can_be_watched(torch.zeros(2, 2).to_sparse())
