"""One batch that no plan fits costs nothing: what is planned stays, and as large a batch is refused at once."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, InfeasibleError
from tests.checkpointable.steps import between, square, step_peak
from tests.execute.training import assert_same, steps
from tests.fields import logged, raises
from tests.plan.test_step_plans import plans_counted

F = nn.functional
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # TorchDynamo looks at it


class Tower(nn.Module):
    """No chain: TorchDynamo captures it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(6))

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            value = F.dropout(value + torch.tanh(layer(value)), 0.1, self.training)
        return value


def chain() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)])


MODELS: dict[str, Callable[[], nn.Module]] = {"chain": chain, "captured": Tower}


def rows(count: int) -> torch.Tensor:
    return torch.randn(count, 32)


def planned_for(kind: str, count: int) -> tuple[Checkpointable, nn.Module]:
    """A model planned for `count` rows, halfway between the least limit and storing everything; and the model alone."""
    torch.manual_seed(0)
    model = MODELS[kind]()
    plain = copy.deepcopy(model)
    planned = Checkpointable(model, loss=square, fresh_grads=True)
    planned.measure(rows(count))
    planned.compute_sequence(between(planned, 0.5))
    return planned, plain


@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_that_is_too_large_is_refused_and_smaller_ones_train_as_before(kind: str) -> None:
    planned, plain = planned_for(kind, 256)
    sequence, report = planned.sequence, str(planned.report())
    with raises(InfeasibleError, "limit_below_held"):
        planned(rows(8192))
    assert planned.sequence is sequence
    assert str(planned.report()) == report
    with plans_counted(planned) as measured:
        for count in (256, 100):
            batch = rows(count)
            assert_same(steps(planned, planned, batch), steps(plain, plain, batch))
        assert step_peak(planned, rows(256), fresh_grads=True) <= planned.mem_limit
        for count in (8192, 9000):
            with pytest.raises(InfeasibleError):
                planned(rows(count))
    assert measured == []


@pytest.mark.parametrize("kind", MODELS)
def test_a_batch_that_was_refused_is_planned_for_under_a_larger_limit(kind: str) -> None:
    planned, _ = planned_for(kind, 256)
    with pytest.raises(InfeasibleError):
        planned(rows(8192))
    planned.mem_limit = "1GB"
    square(planned(rows(8192))).backward()
    assert planned.inspection_values.input_bytes == rows(8192).nbytes or planned.captured


@pytest.mark.parametrize("kind", MODELS)
def test_a_larger_batch_that_fits_is_planned_again(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    planned, plain = planned_for(kind, 64)
    planned.mem_limit = "1GB"
    batch = rows(128)
    assert_same(steps(planned, planned, batch), steps(plain, plain, batch))
    assert logged(caplog, "planning_again", cause="input")
    with plans_counted(planned) as measured:
        square(planned(rows(128))).backward()
        square(planned(rows(64))).backward()
    assert measured == []


@pytest.mark.parametrize("kind", MODELS)
def test_after_measuring_with_too_large_a_batch_smaller_ones_train(kind: str) -> None:
    planned, plain = planned_for(kind, 256)
    limit = planned.mem_limit
    planned.measure(rows(8192))
    with pytest.raises(InfeasibleError):
        planned.compute_sequence()
    batch = rows(256)
    assert_same(steps(planned, planned, batch), steps(plain, plain, batch))
    assert step_peak(planned, batch, fresh_grads=True) <= limit
    with plans_counted(planned) as measured, pytest.raises(InfeasibleError):
        planned(rows(8192))
    assert measured == []


@pytest.mark.parametrize("kind", MODELS)
def test_an_error_of_the_model_while_measuring_leaves_the_plan(kind: str) -> None:
    planned, plain = planned_for(kind, 64)
    sequence = planned.sequence
    for fails in (lambda: planned(torch.randn(128, 31)), lambda: planned.measure(torch.randn(128, 31))):
        with pytest.raises(RuntimeError, match="shape"):
            fails()
        assert planned.sequence is sequence
    batch = rows(64)
    assert_same(steps(planned, planned, batch), steps(plain, plain, batch))


def test_a_refusal_keeps_nothing_of_the_step() -> None:
    planned, _ = planned_for("chain", 64)
    batch = rows(8192)
    gone = weakref.ref(batch)
    with pytest.raises(InfeasibleError):
        planned(batch)
    del batch
    gc.collect()
    assert gone() is None


@pytest.mark.slow
def test_accelerate_finds_the_batch_size_that_fits() -> None:
    memory = pytest.importorskip("accelerate.utils")
    tried: list[int] = []
    planned, _ = planned_for("chain", 64)

    @memory.find_executable_batch_size(starting_batch_size=8192)
    def train(batch_size: int) -> Any:
        tried.append(batch_size)
        square(planned(rows(batch_size))).backward()
        return batch_size

    found = train()
    assert tried[0] == 8192
    assert 64 <= found < 8192
