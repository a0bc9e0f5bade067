"""`with memory_budget(…):` beside torch.compile: what it binds, what it leaves alone, and what it says."""

import copy
import pickle
import warnings
from functools import cache

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.testing import CompileCounterWithBackend

from rotor_py import InfeasibleError, memory_budget
from rotor_py.compile.partitioner import BudgetPartitioner
from tests.checkpointable.steps import Made
from tests.compile.partition.compiled_steps import Loss, take_step
from tests.fields import logged, raises, warns

WIDTH = 16


@pytest.fixture(autouse=True)
def nothing_is_compiled_yet() -> None:
    torch._dynamo.reset()


def chain() -> Loss:
    torch.manual_seed(0)
    return Loss(nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh()))))


def peak_of(model: nn.Module, run: object, rows: int = 256) -> int:
    return take_step(model, run, torch.randn(rows, WIDTH)).peak


@cache
def least_of() -> int:
    """For a batch of 256 rows."""
    with pytest.raises(BackendCompilerFailed) as failed, memory_budget(1):
        torch.compile(chain(), backend="aot_eager")(torch.randn(256, WIDTH)).backward()
    torch._dynamo.reset()
    assert isinstance(failed.value.inner_exception, InfeasibleError)
    return failed.value.inner_exception.min_bytes


def test_the_budget_goes_with_the_model_and_models_outside_keep_what_they_have() -> None:
    budget = int(least_of() * 1.05)
    before, inside = chain(), chain()
    compiled_before = torch.compile(before, backend="aot_eager")
    stored = peak_of(before, compiled_before)
    plain = torch.compile
    with memory_budget(budget):
        run = torch.compile(inside, backend="aot_eager")
        assert peak_of(before, compiled_before) == stored
    assert torch.compile is plain
    assert peak_of(inside, run) <= budget < stored
    with memory_budget(10**12):
        large = torch.compile(inside, backend="aot_eager")
    assert peak_of(inside, large) == stored
    assert peak_of(inside, run) <= budget
    after = chain()
    assert peak_of(after, torch.compile(after, backend="aot_eager")) == stored


def test_a_larger_batch_is_partitioned_for_itself() -> None:
    budget = int(least_of() * 1.1)
    model = chain()
    with memory_budget(budget):
        run = torch.compile(model, backend="aot_eager")
    for rows in (64, 256):
        assert peak_of(model, run, rows) <= budget
    with raises(BackendCompilerFailed, "limit_too_small"):
        run(torch.randn(3000, WIDTH)).backward()


def test_nothing_compiled_inside_is_said_and_caches_tell_budgets_apart() -> None:
    with warns("budget_unused"), memory_budget("1GB"):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with memory_budget("1GB"):
            torch.compile(chain(), backend="aot_eager")
    first, same, other = BudgetPartitioner("1GB"), BudgetPartitioner("1GB"), BudgetPartitioner("2GB")
    assert first == same != other
    assert first.uuid() == same.uuid() != other.uuid()
    assert pickle.loads(pickle.dumps(first)) == first
    assert copy.deepcopy(first) is first


def test_backends_that_do_not_partition_and_other_partitioners_are_refused() -> None:
    with memory_budget("1GB"):
        with raises(ValueError, "excluded_together", name="custom_partitioner_fn"):
            torch.compile(chain(), options=memory_budget("2GB").options)
        with raises(ValueError, "unsupported_backend", name="eager"):
            torch.compile(chain(), backend="eager")
        with raises(ValueError, "unsupported_backend"):
            torch.compile(chain(), backend=CompileCounterWithBackend("eager"))
        own = aot_autograd(fw_compiler=boxed_nop)
        model = chain()
        peak_of(model, torch.compile(model, backend=own))
    with raises(ValueError, "not_a_size"):
        memory_budget("plenty")


def test_graph_breaks_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Made):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            value = self.first[0](value)
            torch._dynamo.graph_break()
            return self.second(value)

    budget = int(least_of() * 1.8)
    with memory_budget(budget):
        torch.compile(Broken(first=chain(), second=chain()), backend="aot_eager")(torch.randn(256, WIDTH)).backward()
    assert logged(caplog, "graphs_over_budget", graphs=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_inductor_keeps_no_code_of_another_budget() -> None:
    found, value = [], torch.randn(256, WIDTH)
    for budget in (10**12, int(least_of() * 1.4), 10**12):
        torch._dynamo.reset()
        model = chain()
        found.append(take_step(model, torch.compile(model, options=memory_budget(budget).options), value))
    assert found[1].peak < found[0].peak == found[2].peak
    assert found[1].equals(found[0])
