"""Whole steps of models whose stages are kept in another form: exact if packed, and close if in fewer bits."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from rotor_py import Checkpointable, PlanMismatchError
from rotor_py.stage.compression import word_of
from rotor_solver import ForwardEnable, Sequence
from tests.capture.steps import adamw, compare
from tests.capture.test_partial_saving import WIDTH, Attention, Gated, NewGelu, Stack
from tests.checkpointable.steps import between, square
from tests.fields import raises


class Residual(nn.Module):
    """Attention whose weights are dropped out, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.mlp = nn.LayerNorm(WIDTH), Attention(), NewGelu()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x + self.dropout(self.attention(self.norm(x))))  # type: ignore[no-any-return]  # a tensor


def convolutions() -> nn.Sequential:
    def block(inside: int, out: int) -> nn.Sequential:
        layers = nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(inplace=True), nn.MaxPool2d(2)
        return nn.Sequential(*layers, nn.Dropout(0.2))

    head = nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 10))
    return nn.Sequential(block(3, 8), block(8, 8), block(8, 8), head)


Made = tuple[nn.Module, dict[str, torch.Tensor]]


def chain() -> Made:
    return convolutions(), {"input": torch.randn(8, 3, 32, 32)}


def captured() -> Made:
    return Stack(Residual(), Gated(), Residual()), {"x": torch.randn(4, 64, WIDTH)}


class Pooled(nn.Module):
    """Two ReLUs whose numbers nobody needs in the backward."""

    def __init__(self, inside: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(inside, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.one(x)), 2)
        return F.dropout(F.relu(self.two(x)), 0.2)


def signs() -> Made:
    return Stack(Pooled(3), Pooled(8), Pooled(8)), {"x": torch.randn(8, 3, 32, 32)}


def measured(make: Callable[[], Any], **options: Any) -> tuple[Checkpointable, nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, batch = make()
    model.train()
    optimizer = adamw(model)
    planned = Checkpointable(model, loss=square, optimizer=optimizer, fresh_grads=True, **options)
    planned.measure(batch)
    return planned, copy.deepcopy(model), batch


@pytest.fixture(autouse=True)
def _any_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotor_py.measure.stage_measurer.worth_choosing", lambda whole, ways: tuple(ways))


def stored_by(planned: Checkpointable, wanted: Callable[[str], bool], limit: int = 10**9) -> int:
    """Have the plan store each stage by the first way that is wanted, where it stores it; how many these are."""
    solved, names = planned.compute_sequence(limit), planned.inspection_values.way_names
    options = [next((1 + at for at, name in enumerate(each) if wanted(name)), 0) for each in names]
    by = lambda each: replace(each, option=options[each.stage]) if isinstance(each, ForwardEnable) else each  # noqa: E731
    planned.sequence = Sequence(map(by, solved))
    return sum(map(bool, options))


@pytest.mark.parametrize("make", [chain, captured, signs])
def test_packed_stages_train_bit_for_bit_inside_the_predicted_peak(make: Callable[[], Any]) -> None:
    planned, plain, batch = measured(make)
    assert stored_by(planned, lambda name: name.endswith("packed"), between(planned, 0.3)) >= 2
    predicted = planned.budget.peak_bytes(planned.sequence)  # type: ignore[arg-type]  # it is there
    peak = compare(planned, plain, batch, square)
    assert 0.97 * predicted <= peak <= predicted


def test_the_sign_of_a_relu_is_a_bit_of_each_number() -> None:
    layers = nn.Sequential(Pooled(3), Pooled(8)), {"input": torch.randn(8, 3, 64, 64)}
    planned, _, _ = measured(lambda: layers)
    costs = planned.inspection_values
    for stage, ways, pixels in zip(costs.stages, costs.ways_by_stage, (64 * 64, 32 * 32), strict=True):
        packed = next(way.cost.saved_bytes for way in ways if way.name == "packed")
        # Of 8 x 8 planes: both ReLUs, of which the second one is a quarter; the places and the mask are packed as well.
        spared = 64 * pixels * (4 - 1 / 8) * 5 / 4 + 64 * pixels / 4 * (8 - 2 + 4 - 1 / 8)
        assert stage.saved_bytes - packed == pytest.approx(spared, rel=0.01)


class Transformed(nn.Dropout):
    """A layer that transforms functions inside, which refuses to be run with hooks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * torch.func.vjp(torch.sin, x)[1](x)[0])


def test_a_layer_that_refuses_hooks_is_stored_whole() -> None:
    layers = nn.Linear(WIDTH, WIDTH), Transformed(), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)
    planned, plain, batch = measured(lambda: (nn.Sequential(*layers), {"input": torch.randn(256, WIDTH)}))
    assert planned.inspection_values.way_names == ((), (), (), ("packed",))
    compare(planned, plain, batch, square)


def gradients(network: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    network.zero_grad()
    torch.manual_seed(7)
    value = square(network(**batch))
    value.backward()  # type: ignore[no-untyped-call]  # of torch
    return value.detach(), torch.cat([each.grad.flatten() for each in network.parameters() if each.grad is not None])


@pytest.mark.parametrize(("word", "most"), [("int8", 0.03), pytest.param("fp8", 0.1, marks=pytest.mark.slow)])
def test_fewer_bits_leave_the_forward_exact_and_the_gradients_close(word: str, most: float) -> None:
    planned, plain, batch = measured(captured, keep=word)
    expected, exact = gradients(plain, batch)
    for way in (f"in {word}", f"in part, in {word}"):
        assert stored_by(planned, way.__eq__) >= 2
        value, found = gradients(planned, batch)
        assert torch.equal(value, expected)
        assert 0 < float((found - exact).norm() / exact.norm()) < most


def test_nothing_is_rounded_unless_it_is_asked_for(tmp_path: Path) -> None:
    planned, _, batch = measured(chain, keep="bf16")
    assert word_of(name for names in planned.inspection_values.way_names for name in names) == "bf16"
    stored_by(planned, lambda name: name == "in bf16")
    planned.save_plan(tmp_path / "plan.json")

    def loaded(**options: Any) -> Checkpointable:
        model = copy.deepcopy(planned.model)
        given = {"loss": square, "optimizer": adamw(model), "fresh_grads": True}
        return Checkpointable(model, plan=tmp_path / "plan.json", **given, **options)

    for other in (None, "int8"):
        with raises(PlanMismatchError, "plan_for_other_model", name="keep="):
            loaded(keep=other)
    again = loaded(keep="bf16")
    assert torch.equal(gradients(again, batch)[1], gradients(planned, batch)[1])
