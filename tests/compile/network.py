"""Small networks compiled stage by stage or whole, of few kinds of stages, since each takes seconds to compile."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

from rotor_py import Checkpointable
from rotor_py.compile import compiled_stage
from rotor_py.compile.joint_graph import JointGraph
from rotor_py.compile.operator_costs import Cost
from rotor_py.compile.stage_code import Compile, NotCompilableError
from rotor_solver import Persistent, Sequence, store_all
from tests.checkpointable.steps import Stack, between, step_peak
from tests.checkpointable.steps import square as loss
from tests.execute.test_moving import same as same

WIDTH = 32


class Block(nn.Module):
    """A residual block with a norm that moves buffers, an activation in place, and dropout."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH, bias=False)
        self.shared.weight = weight

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.relu(self.inner(self.norm(value)), inplace=True)
        return value + self.outer(nn.functional.dropout(inner, 0.3, self.training)) + self.shared(value)


class Net(Stack):
    def __init__(self, blocks: int = 4) -> None:
        # The first two blocks, of which parts are one stage, share no weight: no stage reads the shared one twice.
        first, others = (nn.Parameter(0.1 * torch.randn(WIDTH, WIDTH)) for _ in range(2))
        super().__init__(Block(first), *(Block(others) for _ in range(blocks - 1)))


class Wide(Stack):
    """Blocks of which Inductor makes few kernels: each takes a second to compile."""

    def __init__(self, blocks: int) -> None:
        layers = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        super().__init__(*(nn.Sequential(*copy.deepcopy(layers)) for _ in range(blocks)))


def batch(rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1))


def network(compile: Compile = True, blocks=4, *given: Any, budgets: bool = False, **more: Any) -> Checkpointable:
    """A `Net`, or the `given` model on its sample, whose stages run compiled one by one, all that can be."""
    torch.manual_seed(0)
    model, sample = given or (Net(blocks), batch())
    options = {"compile": compile, "loss": loss, "fresh_grads": True, "granularity": blocks, **more}
    with stage_by_stage(budgets=budgets):
        found = Checkpointable(model, sample, "1GB", **options)
    run_compiled(found)
    return found


@contextmanager
def stage_by_stage(*, budgets: bool = False) -> Iterator[None]:
    """Models measured inside are compiled stage by stage; without `budgets`, in one storage mode, which is quicker."""
    with pytest.MonkeyPatch.context() as patch:
        if not budgets:
            patch.setattr("rotor_py.capture.variants.with_ways", lambda stages, _: list(stages))
        patch.setattr("rotor_py.capture.variants.compiled_whole", lambda *_: None)
        yield


ROWS = 256
"""Rows of a batch for graphs compiled whole."""


def whole(limit: int | str, loss: Any = loss, make: Any = Net, blocks: int = 2) -> Checkpointable:
    """A network that runs compiled as a whole, or else stage by stage, whatever was measured."""
    torch.manual_seed(0)

    def equally_long(_: JointGraph, costs: dict[fx.Node, Cost]) -> dict[fx.Node, Cost]:  # then fewer are faster
        return {node: replace(cost, seconds=1e-6, keeping=0.0) for node, cost in costs.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rotor_py.capture.variants.slower", lambda *_: False)
        patch.setattr("rotor_py.compile.partition.fused_costs", equally_long)
        found = Checkpointable(
            make(blocks), batch(ROWS), limit, compile=True, loss=loss, fresh_grads=True, granularity=2
        )
    plan = found._planner.in_use
    plan.turn_to(plan.ways[0])
    found.sequence = store_all(found.chain)
    return found


class Compilations:
    """Counts what is compiled, and lets it fail for the stages whose number is in `failing`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: range = range(0)) -> None:
        self.count = 0
        self._failing = failing
        self._compile = compiled_stage.compile_code
        monkeypatch.setattr(compiled_stage, "compile_code", self)

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        if self.count - 1 in self._failing:
            raise NotCompilableError("this machine has no compiler\nand more about that")
        return self._compile(*arguments)


def share_of(free: Checkpointable, share: float) -> int:
    fixed = free.budget.fixed.total
    return fixed + int((peak(free) - fixed) * share)


def peak(found: Checkpointable) -> int:
    return found.budget.peak_bytes(found.sequence)


def measured(found: Checkpointable, value: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor] = loss) -> int:
    found.watch, before = False, copy.deepcopy(found.model.state_dict())
    try:
        return [step_peak(found, value, fresh_grads=True, loss=loss) for _ in range(2)][-1]
    finally:
        found.model.load_state_dict(before)


def middle(found: Checkpointable) -> Sequence:
    return found.budget.solve(between(found, 0.5), Persistent())


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
