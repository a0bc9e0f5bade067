"""First runs of stages: what they refuse, what stays aside meanwhile, and that no step takes more than they find."""

import gc
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from rotor_profiling import loss_layouts
from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.measure.discovery_pass import DiscoveryPass
from rotor_py.measure.planning_lock import freeze_again, freeze_gc
from rotor_py.measure.rounds import StageTimes
from tests.checkpointable.steps import CPU, Made, Residual, between, planned_at, same_gradients, square, step_peak
from tests.execute.starved import Capacity
from tests.fields import Noted, raises


@pytest.fixture
def nothing_aside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The suite freezes old objects itself, and hides their count."""
    monkeypatch.setattr("rotor_py.measure.planning_lock.gc", gc)
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.freeze()


class Collecting(nn.Linear):
    """Counts what is frozen in the first of its runs: that takes 40 milliseconds."""

    frozen: ClassVar[list[int]] = Noted()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        if not self.frozen:
            self.frozen.append(gc.get_freeze_count())
        if value.shape[0] == 5:
            raise ArithmeticError
        return super().forward(value)


@pytest.mark.usefixtures("nothing_aside")
def test_old_objects_are_frozen_while_a_model_is_measured_and_those_of_the_caller_stay_frozen() -> None:
    planned = Checkpointable(nn.Sequential(Collecting(4, 4), nn.Linear(4, 4)), cache=False)
    planned.measure(torch.randn(3, 4))
    assert Collecting.frozen.pop() > 10_000
    assert gc.get_freeze_count() == 0
    with pytest.raises(ArithmeticError):
        planned.measure(torch.randn(5, 4))
    assert gc.get_freeze_count() == 0
    gc.freeze()
    before = gc.get_freeze_count()
    with freeze_gc():
        freeze_again()
    assert gc.get_freeze_count() > before // 2 > 0  # some of it may end meanwhile
    gc.unfreeze()
    with freeze_gc():
        before, made = gc.get_freeze_count(), [[] for _ in range(20_000)]
        freeze_again()
        assert gc.get_freeze_count() > before + 10_000
    freeze_again()
    assert gc.get_freeze_count() == 0 < len(made)


class Watched(nn.Linear):
    """Notes of every run whether its operators are watched, and selects numbers if it has 5 outputs."""

    seen: ClassVar[list[bool]] = Noted()

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self.seen.append(type(_get_current_dispatch_mode()).__module__.startswith("rotor_py"))
        made = super().forward(value)
        return made.topk(5, dim=1).values if self.out_features == 5 else made


def test_equal_stages_are_measured_once_and_those_like_one_that_decides_nothing_are_not_watched_for_it() -> None:
    """Watching takes longer than small operators do: timed, the first run of a stage would count as all of them."""
    seen, batch = Watched.seen, torch.randn(3, 4)
    planned = Checkpointable(nn.Sequential(*(Watched(4, 4) for _ in range(6))), batch, loss=torch.sum, cache=False)
    assert 1 <= sum(seen) <= 3  # of six stages: the first, the last and those between them are three kinds
    seen.clear()
    planned.compute_sequence(planned.budget.least_bytes())
    planned(batch).sum().backward()
    assert {*seen} == {False}
    runs = []
    for count in (20, 40):  # a few runs to cut and to pass the value on, none to measure
        seen.clear()
        blocks = (nn.Sequential(Watched(4, 4), nn.Tanh()) for _ in range(count))
        Checkpointable(nn.Sequential(*blocks), cache=False).measure(batch)
        runs.append(len(seen))
    assert runs[1] - runs[0] <= 4 * 20
    seen.clear()
    Checkpointable(nn.Sequential(Watched(4, 5), nn.Linear(5, 4)), batch, loss=torch.sum, cache=False)
    assert any(seen[len(seen) // 2 :])


def test_a_stage_runs_as_often_as_something_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StageTimes, "_another_round", lambda self, kinds: False)
    Watched.seen.clear()
    Checkpointable(nn.Sequential(Watched(4, 4), nn.Tanh()), cache=False).measure(torch.randn(3, 4))
    # To cut; for a trial and layouts; for effects; four for bytes; three for seconds
    assert len(Watched.seen) == 10


class Turning(nn.Linear):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value.contiguous()).mT


def test_layouts_are_found_on_the_first_of_equal_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    walk, ends = DiscoveryPass.walk, []

    def noted(self: DiscoveryPass, progress: Any = None, last: int | None = None) -> Any:
        ends.append(last)
        return walk(self, progress, last)

    monkeypatch.setattr(DiscoveryPass, "walk", noted)
    Checkpointable(nn.Sequential(*(Turning(4, 4) for _ in range(9))), cache=False).measure(torch.randn(2, 4, 4))
    assert ends == [None, 1]


ROWS = torch.randn(512, 8)


class InAList(Made):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(value, self.others[0].weight)


class Detached(InAList):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(value, self.others[0].weight.detach())


def chain(user: type[InAList]) -> nn.Sequential:
    torch.manual_seed(0)
    first = nn.Linear(8, 8)
    return nn.Sequential(
        first, nn.Tanh(), user(others=[first]), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), user(others=[first])
    )


def least(model: nn.Module) -> Checkpointable:
    return planned_at(0.0, model, ROWS, loss=torch.sum, fresh_grads=True, cache=False)


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


LABELS = torch.randint(200, (16, 12), generator=torch.Generator().manual_seed(0))


class First(nn.Sequential):
    """The first of what a layer returns."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value)[0]


def recurrent() -> nn.Module:
    return First(nn.LSTM(48, 48, batch_first=True))


def lstms() -> nn.Sequential:
    return nn.Sequential(nn.Linear(48, 48), recurrent(), recurrent(), nn.Linear(48, 20))


def with_elementwise_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(48, 48), recurrent(), nn.Tanh(), nn.Dropout(0.1), nn.Sigmoid(), nn.Linear(48, 20))


def with_large_output() -> nn.Sequential:
    return nn.Sequential(nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 200))


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (lstms, square),
        (with_elementwise_layers, square),
        (with_large_output, lambda output: F.cross_entropy(output.transpose(1, 2), LABELS)),
    ],
)
def test_copies_that_backwards_begin_with_are_inside_the_limit(make, loss) -> None:
    sample = torch.randn(16, 12, 48)
    planned = Checkpointable(make(), sample, loss=loss, fresh_grads=True)
    for limit in (between(planned, share) for share in (0, 0.5, 1)):
        predicted = planned.budget.peak_bytes(planned.compute_sequence(limit))
        assert 0.98 * predicted <= step_peak(planned, sample, fresh_grads=True, loss=loss) <= limit


def test_a_loss_says_in_which_layout_it_gives_gradients() -> None:
    output = {"a": torch.randn(3, 5, requires_grad=True), "b": torch.randn(3), "c": torch.randn(2, 4).requires_grad_()}
    assert loss_layouts(lambda found: (found["a"].t() * torch.ones(5, 3)).sum(), output, CPU) == ((1, 3), None, None)
    assert loss_layouts(lambda found: found["c"].sum(), output, CPU) == (None, None, (0, 0))


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[DiscoveryPass]:
    """The discovery passes that walk a chain from now on, once for each walk."""
    found, walk = [], DiscoveryPass.walk
    noting = lambda survey, *rest, **until: (found.append(survey), walk(survey, *rest, **until))[1]  # noqa: E731
    monkeypatch.setattr(DiscoveryPass, "walk", noting)
    return found


@pytest.mark.parametrize(
    ("make", "batch", "count"),
    [(with_large_output, 16, 1), (lstms, 16, 2), (with_elementwise_layers, 16, 5), (with_elementwise_layers, 1, 1)],
)
def test_a_chain_is_walked_again_only_where_layouts_differ(make, batch, count, walks) -> None:
    """Those of a batch of one mean the same in any order."""
    Checkpointable(make(), loss=square).measure(torch.randn(batch, 12, 48))
    assert len(walks) == count


class Skipping(Made):
    """Its first value comes back after all layers, each of a kind of its own. Its gradient is a part of a wider one."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        skipped = value = self.first(value)
        for layer in self.layers:
            value = layer(value).tanh()
        return self.last(torch.cat([value, skipped], dim=1))


def test_a_gradient_that_only_passes_through_stages_needs_few_walks(walks: list[DiscoveryPass]) -> None:
    layers = nn.ModuleList(nn.Linear(width, width + 1) for width in range(8, 14))
    model = Skipping(first=nn.Linear(8, 8), layers=layers, last=nn.Linear(22, 4))
    Checkpointable(model, torch.randn(5, 8), loss=square, cache=False)
    assert sum((22, 1) in layouts for layouts in walks[-1].arriving) > 6
    assert len(walks) <= 3


WIDTH = 32


def wide(factor: int) -> nn.Module:
    return Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, factor * WIDTH), nn.GELU(), nn.Linear(factor * WIDTH, WIDTH))


class ReadAgain(nn.Module):
    """One tensor, with a gradient or without, is read by some of the layers after it.

    Without a gradient it is the result of dropout, as XLNet's positions are: what is not random would run in front.
    """

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.trained = trained
        self.first, self.product, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.blocks = nn.ModuleList(wide(factor) for factor in (1, 1, 16, 2, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.first(x) if self.trained else F.dropout(x, 0.5)
        value = read if self.trained else read + self.first(x)
        for number, block in enumerate(self.blocks):
            value = block(value)
            if number in (1, 4):
                value = value + read
            elif number != 2:
                value = value * self.product(read).sigmoid()
        return self.head(value)


@pytest.mark.parametrize("trained", [False, True])
def test_a_tensor_that_several_stages_read_is_in_memory_until_the_first_of_them_has_run_backward(trained: bool) -> None:
    model, batch = ReadAgain(trained).train(), torch.randn(256, WIDTH)
    planned = Checkpointable(model, batch, loss=square, fresh_grads=True, cache=False, watch=False)
    assert (0 in [each.gradient_bytes for each in planned.inspection_values.carried]) is not trained
    for share in (0.1, 1):
        sequence = planned.compute_sequence(between(planned, share))
        _, measured = (step_peak(planned, batch, fresh_grads=True) for _ in range(2))
        predicted = planned.budget.peak_bytes(sequence)
        assert 0.95 * predicted <= measured <= predicted


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("shape", ["large parameters", "large output"])
def test_measuring_takes_no_more_than_the_least_limit(shape: str, fresh: bool) -> None:
    if shape == "large output":
        model, batch = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2048)), torch.randn(256, 64)
    else:
        block = [nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 256)) for _ in range(3)]
        model, batch = nn.Sequential(*block), torch.randn(8, 256)
    for parameter in model.parameters() if not fresh else ():
        parameter.grad = torch.zeros_like(parameter)
    present = [*model.parameters(), batch, *(each.grad for each in model.parameters() if each.grad is not None)]
    planned = Checkpointable(model, fresh_grads=fresh, cache=False)
    with Capacity() as device:
        planned.measure(batch)
    # A thousandth for what measuring itself makes, such as the ones that a backward begins with.
    assert device.peak + sum(each.nbytes for each in present) <= 1.001 * planned.budget.least_bytes()
