"""Layers of an `nn.Sequential`, captured one by one to be stored in part: the same bits, and fewer bytes."""

from __future__ import annotations

import copy
import gc
import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from tests.capture.steps import adamw, assert_same_gradients, compare, in_part
from tests.capture.test_partial_saving import WIDTH, loss
from tests.capture.test_partial_saving import NewGelu as Block
from tests.fields import logged

ROWS = 1024


class Odd(Block):
    """A block, and something that no graph has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * float(x.detach()[0, 0] < 1e9)


class Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(1)
        return super().forward(x)


class Noting(Block):
    """A block that notes the mean of its last input."""

    mean: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = x.detach().mean()
        return super().forward(x)


def measured(*layers: nn.Module, rows: int = ROWS) -> tuple[Checkpointable, torch.Tensor]:
    torch.manual_seed(0)
    model, batch = nn.Sequential(*layers).train(), torch.randn(rows, WIDTH)
    planned = Checkpointable(model, loss=loss, optimizer=adamw(model), fresh_grads=True)
    planned.measure(batch)
    assert not planned.captured
    return planned, batch


def names(planned: Checkpointable) -> tuple[tuple[str, ...], ...]:
    assert planned.inspection_values is not None
    return tuple(
        tuple(name for name in each if name.startswith("in part")) for each in planned.inspection_values.way_names
    )


def test_layers_stored_in_part_train_as_ever_within_the_predicted_peak() -> None:
    planned, batch = measured(Block(), Block(), nn.Linear(WIDTH, WIDTH), Block())
    assert [bool(each) for each in names(planned)] == [True, True, False, True]
    for again in (0, 2):
        planned.sequence = in_part(planned, again)
        assert planned.budget is not None
        predicted = planned.budget.peak_bytes(planned.sequence)
        found = compare(planned, copy.deepcopy(planned.model), {"input": batch}, loss)
        assert 0.98 * predicted <= found <= predicted
    assert list(planned.state_dict()) == list(planned.model.state_dict())


def test_a_smaller_batch_and_a_plan_from_a_file_are_stored_in_part_as_well(tmp_path: Path) -> None:
    planned, batch = measured(Block(), Block())
    planned.sequence = in_part(planned)
    assert planned.budget is not None
    predicted = planned.budget.peak_bytes(planned.sequence)
    plain = copy.deepcopy(planned.model)
    planned.save_plan(tmp_path / "plan.json")
    model = copy.deepcopy(plain)
    loaded = Checkpointable(model, loss=loss, optimizer=adamw(model), fresh_grads=True, plan=tmp_path / "plan.json")
    for network in (planned, loaded, copy.deepcopy(loaded)):
        least = [compare(network, plain, {"input": batch[:rows]}, loss) for rows in (ROWS, ROWS // 2)]
        assert 0.98 * predicted <= least[0] <= predicted
        assert least[1] < 0.75 * predicted


@pytest.mark.parametrize("rows", [32, pytest.param(ROWS, marks=pytest.mark.slow)])
def test_small_layers_and_those_that_are_not_captured_keep_their_other_ways(rows: int) -> None:
    hooked = Block()
    hooked.inner.register_forward_hook(lambda module, args, output: output * 2)
    layers = (
        (hooked, Odd(), Counting(), nn.Linear(WIDTH, WIDTH)) if rows == ROWS else (Block(), nn.Linear(WIDTH, WIDTH))
    )
    planned, batch = measured(*layers, rows=rows)
    assert names(planned) == ((),) * len(layers)
    planned.sequence = in_part(planned)
    compare(planned, copy.deepcopy(planned.model), {"input": batch}, loss)


def test_a_layer_stored_in_part_has_its_side_effects_and_later_hooks_and_holds_nothing_when_it_was_measured(
    caplog: pytest.LogCaptureFixture,
) -> None:
    planned, batch = measured(Noting(), nn.Linear(WIDTH, WIDTH))
    assert names(planned)[0]
    gc.collect()
    held = [each for each in gc.get_objects() if type(each) is torch.Tensor and each.grad_fn is not None]
    assert [each.shape for each in held if each.shape == (ROWS, 4 * WIDTH)] == []
    planned.sequence = in_part(planned)
    layer: Noting = planned.model[0]  # type: ignore[index]
    for each in (batch, 2 * batch):
        planned(each).sum().backward()
        assert torch.equal(layer.mean, each.mean())  # type: ignore[arg-type]
    calls: list[torch.Size] = []
    layer.inner.register_forward_hook(lambda module, args, output: calls.append(output.shape))
    with caplog.at_level(logging.WARNING, logger="rotor_py"):
        planned(batch).sum().backward()
    assert len(calls) == 1
    assert logged(caplog, "stored_whole", name="0")


def test_autocast_is_that_of_the_forward() -> None:
    torch.manual_seed(0)
    model, batch = nn.Sequential(Block(), Block()).train(), torch.randn(ROWS, WIDTH)
    planned = Checkpointable(copy.deepcopy(model), loss=loss, optimizer=adamw(model), fresh_grads=True)
    networks = (planned, model)
    with torch.autocast("cpu", torch.bfloat16):
        planned.measure(batch)
    assert any(names(planned))
    planned.sequence = in_part(planned, again=1)
    for network in networks:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            value = loss(network(batch))
        value.backward()  # as people do: outside
    assert_same_gradients(planned, model)
