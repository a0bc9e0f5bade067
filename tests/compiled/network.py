"""A small network with all that makes numbers hard to keep, and few kinds of stages: kinds are what is compiled."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.compile.stage_code import Compile
from rotor_solver import Sequence

WIDTH = 32


class Block(nn.Module):
    """A residual block with a norm that moves buffers, an activation in place, and dropout."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.shared.weight = weight  # the same in all blocks

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.relu(self.inner(self.norm(value)), inplace=True)
        return value + self.outer(nn.functional.dropout(inner, 0.3, self.training)) + self.shared(value)


class Net(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        weight = nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block(weight) for _ in range(blocks))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            value = block(value)
        return value


class Wide(nn.Module):
    """Blocks of which Inductor makes few kernels: each takes a second to compile."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(WIDTH, 2 * WIDTH) for _ in range(blocks))
        self.back = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for into, back in zip(self.into, self.back, strict=True):
            value = back(nn.functional.gelu(into(value)))
        return value


def batch(rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.float().square().mean()


def network(compile: Compile = True, blocks: int = 4, *, budgets: bool = False, **given: Any) -> Checkpointable:
    """A `Net` whose stages run compiled one by one, all that can be, whatever was measured."""
    torch.manual_seed(0)
    with stage_by_stage(budgets=budgets):
        found = Checkpointable(
            Net(blocks), batch(), "1GB", compile=compile, loss=loss, fresh_grads=True, granularity=blocks, **given
        )
    run_compiled(found)
    return found


@contextmanager
def stage_by_stage(*, budgets: bool = False) -> Iterator[None]:
    """What is measured inside is not compiled as a whole, although it fits.

    Without `budgets`, stages are stored in one way alone: each takes seconds to compile. With them, two other ways of
    the most frequent kind are compiled, whether or not a plan would use them, which is a matter of times.
    """
    with pytest.MonkeyPatch.context() as patch:
        if budgets:
            patch.setattr("rotor_py.capture.variants._wanted", _two_ways)
        else:
            patch.setattr("rotor_py.capture.variants.may_have_ways", lambda *_: False)
        patch.setattr("rotor_py.capture.variants.compiled_whole", lambda *_: None)
        yield


def _two_ways(_: object, stages: list[Any]) -> list[tuple[Any, str]]:
    ((code, _count),) = Counter(stage.code for stage in stages).most_common(1)
    foreseen = next(stage.foreseen for stage in stages if stage.code is code)
    return [(code, each.way) for each in (foreseen[0], foreseen[-1])]


def run_compiled(found: Checkpointable) -> None:
    """Have all stages run compiled that can be: which are faster so is a matter of times."""
    plan = found._planner.in_use
    plan.turn_to(plan.ways[-2])
    assert found.compiled


def results(found: Checkpointable, sequence: Sequence, value: torch.Tensor, passes: int = 1) -> list[torch.Tensor]:
    """The output, gradients and buffers of a step by `sequence`, which is otherwise always the same."""
    model = found.model
    before = copy.deepcopy(model.state_dict())
    model.zero_grad()
    found.sequence = sequence
    torch.manual_seed(2)
    output = found(value)
    for last in [False] * (passes - 1) + [True]:
        loss(output).backward(retain_graph=not last)
    made = [output.detach(), *gradients(model), *(each.clone() for each in model.buffers())]
    model.load_state_dict(before)
    return made


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


def same(found: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
