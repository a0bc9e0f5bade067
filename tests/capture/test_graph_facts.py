"""How a graph is read and cut: what runs before, what is carried, which modes are on, how stages are called."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, UnsupportedModelError
from tests.capture.steps import adamw, assert_same_gradients, compare, limits
from tests.fields import raises

F = nn.functional


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = 1 / (1 + torch.arange(4.0).mean())
        with torch.autocast("cpu", enabled=False):
            inner = self.norm(value)
        inner = F.dropout(self.narrow(F.gelu(self.wide(inner))), 0.1, self.training).relu_()
        return value + inner * mask * scale


class Tower(nn.Module):
    """Blocks with a mask that is made from the input, and normalisation by hand."""

    def __init__(self, depth: int = 5, width: int = 48) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("table", torch.linspace(0, 1, width))

    def forward(self, ids: torch.Tensor, *, weight: torch.Tensor | None = None) -> dict[str, Any]:
        mask = (ids > 2).float()[..., None] * self.table
        value = self.embed(ids)
        for block in self.blocks:
            value = block(value, mask if weight is None else mask * weight)
        value = self.norm(value.transpose(1, 2)).transpose(1, 2)
        return {"value": value, "mask": mask, "nested": [value.mean(), (ids, 7)]}


def tower_loss(output: dict[str, Any]) -> torch.Tensor:
    return output["value"].square().mean()


def planned_tower(**options: Any) -> tuple[Checkpointable, nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = Tower()
    inputs = {"ids": torch.randint(20, (16, 40))}
    planned = Checkpointable(model, loss=tower_loss, fresh_grads=True, **options)
    planned.measure(inputs)
    return planned, copy.deepcopy(model), inputs


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_modes_random_numbers_buffers_and_in_place_operators_are_as_in_plain_training(share: float) -> None:
    planned, plain, inputs = planned_tower(optimizer=None)
    least, whole = limits(planned)
    planned.compute_sequence(int(least + share * (whole - least)))
    compare(planned, plain, inputs, tower_loss, steps=3)


def test_stages_are_named_after_modules_and_equal_ones_are_measured_once() -> None:
    planned, _, _ = planned_tower()
    assert "blocks.2" in planned.names
    assert planned.names[-1] == "norm"
    costs = dict(zip(planned.names, planned.inspection_values.stages, strict=True))
    assert costs["blocks.1"] is costs["blocks.2"] is costs["blocks.3"]


def test_what_carries_no_gradient_is_shared_and_not_a_checkpoint() -> None:
    planned, _, _ = planned_tower()
    block = planned.functions[planned.names.index("blocks.2")]
    assert block.shared >= 1
    assert planned.chain.stages[planned.names.index("blocks.2")].activation == 16 * 40 * 48 * 4


def test_nested_outputs_and_the_models_own_attributes_come_back() -> None:
    planned, plain, inputs = planned_tower(mem_limit="1GB")
    torch.manual_seed(1)
    found = planned(**inputs)
    torch.manual_seed(1)
    expected = plain(**inputs)
    assert found.keys() == expected.keys()
    assert found["nested"][1][1] == 7
    assert torch.equal(found["mask"], expected["mask"])
    assert found["value"].requires_grad
    assert planned.table is planned.model.table
    assert planned.state_dict().keys() == plain.state_dict().keys()


class Skipping(nn.Module):
    """A value that is needed again at the end."""

    def __init__(self, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.last = nn.Linear(width, 1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        kept = value = self.first(value).tanh()
        for layer in self.layers:
            value = F.silu(layer(value)).sin()
        return self.last(value * kept)


def test_a_tensor_that_stays_live_is_carried_past_cuts_and_saves_memory() -> None:
    torch.manual_seed(0)
    model, inputs = Skipping(), {"value": torch.randn(256, 64)}
    plain = copy.deepcopy(model)
    planned = Checkpointable(
        model, loss=lambda output: output.square().mean(), optimizer=adamw(model), fresh_grads=True
    )
    planned.measure(inputs)
    assert len(planned.names) > 5
    assert len(planned.inspection_values.carried) == 1
    least, whole = limits(planned)
    assert least < 0.85 * whole
    for limit in (least, (least + whole) // 2):
        planned.compute_sequence(limit)
        measured = compare(planned, plain, inputs, lambda output: output.square().mean())
        assert 0.97 * planned.budget.peak_bytes(planned.sequence) <= measured <= limit


def test_granularity_bounds_the_number_of_stages() -> None:
    planned, _, _ = planned_tower(granularity=3)
    assert len(planned.names) <= 3


class Partly(nn.Module):
    """A model of which TorchDynamo captures a part."""

    def __init__(self, captured: int, outside: int) -> None:
        super().__init__()
        self.captured = nn.Sequential(*(nn.Linear(32, 32) for _ in range(captured)))
        self.outside = nn.Sequential(*(nn.Linear(32, 32) for _ in range(outside)))

    @torch._dynamo.disable
    def apart(self, value: torch.Tensor) -> torch.Tensor:
        return self.outside(value)  # the line to be named

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return self.apart(self.captured(value))


@pytest.mark.parametrize(("captured", "outside"), [(0, 1), (8, 2)])
def test_a_model_of_which_much_is_not_captured_is_refused_and_the_line_is_named(captured: int, outside: int) -> None:
    lines = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "the line to be named" in text)
    with raises(UnsupportedModelError, "outside_graphs") as caught:
        Checkpointable(Partly(captured, outside), torch.ones(64, 32))
    assert f"test_graph_facts.py:{line}" in str(caught.value.name)


def test_a_model_without_gradients_in_any_graph_is_refused_in_one_sentence() -> None:
    with raises(UnsupportedModelError, "no_graph", name="Partly"):
        Checkpointable(Partly(1, 0).requires_grad_(False), torch.ones(3, 32))


def frozen_first(model: Tower) -> None:
    model.embed.requires_grad_(False)
    model.blocks[:2].requires_grad_(False)


def only_some(model: Tower) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("wide" in name)


@pytest.mark.parametrize(
    ("change", "dtype"), [(frozen_first, None), (only_some, torch.bfloat16), (lambda model: None, torch.bfloat16)]
)
def test_frozen_parts_and_autocast_around_the_model(change: Any, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, ids = Tower(depth=3), torch.randint(20, (8, 24))
    change(model)
    plain = copy.deepcopy(model)
    surroundings = torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)
    with surroundings:
        planned = Checkpointable(model, {"ids": ids}, loss=tower_loss, fresh_grads=True)
        planned.compute_sequence(limits(planned)[0])
    for network in (planned, plain):
        torch.manual_seed(1)
        with surroundings:
            loss = tower_loss(network(ids))
        loss.backward()
    assert_same_gradients(model, plain)
