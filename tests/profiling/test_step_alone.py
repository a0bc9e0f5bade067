"""What the step of one parameter takes, found without a step of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rotor_profiling import measured_peak
from rotor_profiling.step.alone import scratch_alone, step_bytes_without

CPU = torch.device("cpu")


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(size, size)) for size in (100, 150)] + [nn.Parameter(torch.ones(9), False)]


@pytest.mark.parametrize(
    "make",
    [
        lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9, weight_decay=0.1),
        lambda given: torch.optim.AdamW(given),
        lambda given: torch.optim.Adam(given, amsgrad=True, weight_decay=0.1),
        lambda given: torch.optim.Adafactor(given),
    ],
)
def test_scratch_is_what_the_step_of_one_parameter_takes(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    given = parameters()
    found = scratch_alone(make(given))
    assert set(found) == {id(each) for each in given[:2]}
    for each in given[:2]:
        alone = make([each])
        each.grad = torch.randn_like(each)
        alone.step()
        measured = measured_peak(alone.step, [], CPU)
        assert measured <= found[id(each)] <= measured + 128


def test_the_step_of_the_others_takes_what_they_need() -> None:
    given = parameters()
    optimizer = torch.optim.AdamW(given)
    scratch = scratch_alone(optimizer)
    assert step_bytes_without(optimizer, set()) >= max(scratch.values())
    assert step_bytes_without(optimizer, {id(given[1])}) == scratch[id(given[0])]
    assert step_bytes_without(optimizer, {id(given[0]), id(given[1])}) == 0
    assert not optimizer.state
