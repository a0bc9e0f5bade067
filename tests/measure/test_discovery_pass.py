"""First runs of stages: what they refuse, and what stays aside meanwhile."""

import gc
from collections.abc import Callable, Iterator
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.measure.planning_lock import freeze_gc
from tests.checkpointable.steps import same_gradients
from tests.fields import raises


@pytest.fixture
def nothing_aside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The suite freezes old objects itself, and hides their count."""
    monkeypatch.setattr("rotor_py.measure.planning_lock.gc", gc)
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.freeze()


class Collecting(nn.Linear):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        assert gc.get_freeze_count() > 10_000
        if value.shape[0] == 5:
            raise ArithmeticError
        return super().forward(value)


@pytest.mark.usefixtures("nothing_aside")
def test_old_objects_are_frozen_while_a_model_is_measured_and_those_of_the_caller_stay_frozen() -> None:
    planned = Checkpointable(nn.Sequential(Collecting(4, 4), nn.Linear(4, 4)), cache=False)
    planned.measure(torch.randn(3, 4))
    assert gc.get_freeze_count() == 0
    with pytest.raises(ArithmeticError):
        planned.measure(torch.randn(5, 4))
    assert gc.get_freeze_count() == 0
    gc.freeze()
    before = gc.get_freeze_count()
    with freeze_gc():
        pass
    assert gc.get_freeze_count() > before // 2 > 0  # some of it may end meanwhile


class Watched(nn.Linear):
    """Notes of every run whether a mode sees its operators, and selects numbers if it has 5 outputs."""

    seen: ClassVar[list[bool]] = []

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.seen.append(_get_current_dispatch_mode() is not None)
        made = super().forward(value)
        return made.topk(5, dim=1).values if self.out_features == 5 else made


def test_stages_like_one_that_decides_nothing_are_not_watched_for_it() -> None:
    """Watching takes longer than small operators do: timed, the first run of a stage would count as all of them."""
    seen, batch = Watched.seen, torch.randn(3, 4)
    planned = Checkpointable(nn.Sequential(*(Watched(4, 4) for _ in range(6))), batch, loss=torch.sum, cache=False)
    assert 1 <= sum(seen) <= 3  # of six stages: the first, the last and those between them are three kinds
    seen.clear()
    planned.compute_sequence(planned.budget.least_bytes())
    planned(batch).sum().backward()
    assert {*seen} == {False}
    seen.clear()
    Checkpointable(nn.Sequential(Watched(4, 5), nn.Linear(5, 4)), batch, loss=torch.sum, cache=False)
    assert any(seen[len(seen) // 2 :])


ROWS = torch.randn(512, 8)


class InAList(nn.Module):
    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(value, self.others[0].weight)


class Detached(InAList):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(value, self.others[0].weight.detach())


def chain(user: Callable[[nn.Linear], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(8, 8)
    return nn.Sequential(first, nn.Tanh(), user(first), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), user(first))


def least(model: nn.Module) -> Checkpointable:
    planned = Checkpointable(model, ROWS, loss=torch.sum, fresh_grads=True, cache=False)
    planned.compute_sequence(planned.budget.least_bytes())
    return planned


SCALE = torch.ones(8, requires_grad=True)


class Scaled(InAList):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * SCALE


@pytest.mark.parametrize("user", [InAList, Scaled])
def test_a_parameter_that_a_stage_does_not_own_is_refused_and_measuring_leaves_no_gradient(user) -> None:
    model = chain(user)
    with raises(UnsupportedModelError, "foreign_parameter", name="2"):
        least(model)
    assert all(each.grad is None for each in (*model.parameters(), SCALE))


def test_a_detached_parameter_of_another_stage_is_read_again_with_the_same_numbers() -> None:
    plain, model = chain(Detached), chain(Detached)
    plain(ROWS).sum().backward()
    planned = least(model)
    assert "CF_" in str(planned.sequence)
    planned(ROWS).sum().backward()
    assert same_gradients(model, plain)
