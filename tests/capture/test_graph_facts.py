"""How a graph is read and cut: what runs before, what is carried, which modes are on, how stages are called."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, UnsupportedModelError
from tests.capture.steps import assert_same_gradients, compare
from tests.checkpointable.steps import between
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

    def __init__(self, depth: int = 4, width: int = 48) -> None:
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


def test_modes_random_numbers_buffers_and_in_place_operators_are_as_in_plain_training() -> None:
    planned, plain, inputs = planned_tower(optimizer=None)
    for share in (0.0, 0.3):
        planned.compute_sequence(between(planned, share))
        compare(planned, plain, inputs, tower_loss)


def test_stages_are_named_after_modules_share_what_has_no_gradient_and_return_the_models_output() -> None:
    planned, plain, inputs = planned_tower(mem_limit="1GB")
    at = planned.names.index("blocks.2")
    assert planned.names[-1] == "norm"
    costs = dict(zip(planned.names, planned.inspection_values.stages, strict=True))
    assert costs["blocks.1"] is costs["blocks.2"], "equal stages are measured once"
    assert planned.functions[at].shared >= 1
    assert planned.chain.stages[at].activation == 16 * 40 * 48 * 4, "the mask is no part of a checkpoint"
    outputs = []
    for network in (planned, plain):
        torch.manual_seed(1)
        outputs.append(network(**inputs))
    found, expected = outputs
    assert found.keys() == expected.keys()
    assert found["nested"][1][1] == 7
    assert torch.equal(found["mask"], expected["mask"])
    assert found["value"].requires_grad
    assert planned.table is planned.model.table
    assert planned.state_dict().keys() == plain.state_dict().keys()


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


@pytest.mark.slow
@pytest.mark.parametrize(("change", "dtype"), [(frozen_first, None), (only_some, torch.bfloat16)])
def test_frozen_parts_and_autocast_around_the_model(change: Any, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    model, ids = Tower(depth=3), torch.randint(20, (8, 24))
    change(model)
    plain = copy.deepcopy(model)
    surroundings = torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None)
    with surroundings:
        planned = Checkpointable(model, {"ids": ids}, loss=tower_loss, fresh_grads=True)
        planned.compute_sequence(between(planned, 0.0))
    for network in (planned, plain):
        torch.manual_seed(1)
        with surroundings:
            loss = tower_loss(network(ids))
        loss.backward()
    assert_same_gradients(model, plain)
