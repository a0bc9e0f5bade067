"""Models with `torch.vmap` inside: its regions are whole in one stage, and trained as any other operator."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, UnsupportedModelError
from tests.capture.steps import adamw, assert_same_gradients, compare, limits
from tests.fields import logged, raises


class Scored(nn.Module):
    """Layers with a vmap between them, in which trained tensors from outside are read, and random numbers drawn."""

    def __init__(self, *, noise: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.weights = nn.ParameterList(nn.Parameter(torch.rand(32)) for _ in range(4))
        self.noise = noise

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for layer, weight in zip(self.layers, self.weights, strict=True):

            def score(row: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
                drawn = torch.rand_like(row) if self.noise else 1.0
                return (row * weight).tanh() * row.sum() * drawn

            value = torch.vmap(score, randomness="different")(layer(value)).relu()
        return value


def mean(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


@pytest.mark.parametrize("noise", [False, True])
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_a_model_with_vmap_trains_inside_the_limit_with_the_same_numbers(noise: bool) -> None:
    torch.manual_seed(0)
    model, inputs = Scored(noise=noise), {"value": torch.randn(512, 32)}
    plain = copy.deepcopy(model)
    planned = Checkpointable(model, loss=mean, optimizer=adamw(model), fresh_grads=True)
    planned.measure(inputs)
    least, whole = limits(planned)
    assert len(planned.names) >= 4
    for limit in (least, (least + whole) // 2):
        planned.compute_sequence(limit)
        assert compare(planned, plain, inputs, mean) <= limit


class Either(Scored):
    """Another function inside for batches of few rows."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made, few = super().forward(value), len(value) < 8
        return torch.vmap(lambda row: row.exp() if few else row.sin())(made)


@pytest.mark.filterwarnings("ignore")
def test_another_function_inside_is_another_graph(caplog: pytest.LogCaptureFixture) -> None:
    model = Either()
    plain = copy.deepcopy(model)
    planned = Checkpointable(model, {"value": torch.randn(16, 32)}, mem_limit="1GB", loss=mean)
    with caplog.at_level(logging.WARNING, "rotor_py"):
        for rows in (12, 6, 16):
            value = torch.randn(rows, 32)
            for each in (planned, plain):
                each.zero_grad()
                mean(each(value=value)).backward()
            assert_same_gradients(planned, plain)
    assert len(logged(caplog, "planning_again")) == 1  # for few rows, and once


class Failing(Scored):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: row[torch.tensor(99)])(super().forward(value))


@pytest.mark.filterwarnings("ignore")
def test_an_error_inside_leaves_no_transform_on() -> None:
    with pytest.raises(IndexError):
        Checkpointable(Failing(), {"value": torch.randn(4, 32)}, loss=mean)
    assert torch._C._functorch.maybe_current_level() is None


class Writing(Scored):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        made = super().forward(value)
        kept = made.detach().clone()
        torch.vmap(lambda row: kept.mul_(2).sum() * row.sum())(made)
        return made


def test_a_write_to_a_tensor_outside_is_refused_with_its_line() -> None:
    with raises(UnsupportedModelError, "in_place_input"):
        Checkpointable(Writing(), {"value": torch.randn(4, 32)}, loss=mean)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_state_space_model_trains_inside_the_limit() -> None:
    """Traced, they scan with vmap; eagerly they go token by token, so that the last digits differ."""
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
    model, ids = transformers.MambaForCausalLM(config), torch.randint(3, 50, (2, 8))
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    eager = copy.deepcopy(model).train()
    traced = torch.compile(copy.deepcopy(model).train(), backend="eager")
    planned = Checkpointable(model, optimizer=adamw(model), fresh_grads=True)
    planned.measure(inputs)
    least, whole = limits(planned)
    planned.compute_sequence((least + whole) // 2)
    with torch._dynamo.config.patch(recompile_limit=64):  # other tests have traced the library's functions, too
        for each in (eager, traced, planned):
            each(**inputs).loss.backward()
    pairs = zip(planned.parameters(), traced.parameters(), eager.parameters(), strict=True)
    for found, same, close in pairs:
        assert (found.grad is None) == (same.grad is None)
        if found.grad is not None:
            assert torch.equal(found.grad, same.grad)
            torch.testing.assert_close(found.grad, close.grad, atol=1e-6, rtol=1e-4)
