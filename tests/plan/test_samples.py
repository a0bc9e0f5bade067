"""What a plan is made with: tensors, tuples, dicts, loaders, and what people write by mistake."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from rotor_py import Checkpointable, UnsupportedModelError
from tests.fields import raises

CHAIN = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
DATA = torch.randn(12, 8)


class Product(nn.Module):
    """Takes one or two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, value: torch.Tensor, factor: torch.Tensor | None = None) -> torch.Tensor:
        value = self.layer(value).tanh()
        return value if factor is None else value * factor


def loader(*columns: torch.Tensor) -> Any:
    return DataLoader(TensorDataset(*columns), batch_size=4, shuffle=True)


@pytest.mark.parametrize("model", [CHAIN, Product()], ids=["chain", "captured"])
def test_the_first_batch_of_a_loader_is_taken_and_no_random_number_is_drawn(model: nn.Module) -> None:
    planned = Checkpointable(model, mem_limit="1GB")
    before = torch.get_rng_state()
    planned.measure(loader(DATA))
    assert torch.equal(torch.get_rng_state(), before)
    assert planned(DATA[:4]).shape == (4, 8)
    assert planned.sequence is not None


@pytest.mark.parametrize("sample", [(DATA[:4], DATA[:4]), loader(DATA, DATA)], ids=["pair", "loader"])
def test_targets_beside_the_input_are_refused_in_one_sentence(sample: Any) -> None:
    with raises(UnsupportedModelError, "too_many_arguments", got=2):
        Checkpointable(CHAIN, sample, mem_limit="1GB")
    Checkpointable(Product(), sample, mem_limit="1GB")  # takes two


@pytest.mark.parametrize("limit", ["1GB", 1e9, 10**9])
def test_a_limit_in_the_place_of_the_sample_is_told(limit: Any) -> None:
    with raises(UnsupportedModelError, "not_a_sample"):
        Checkpointable(CHAIN, limit)


def test_a_limit_may_be_a_float() -> None:
    found = Checkpointable(CHAIN, DATA[:4], mem_limit=1e9)
    assert found.mem_limit == 10**9
    assert found.sequence is not None


def test_a_loader_without_a_batch_is_told() -> None:
    with raises(UnsupportedModelError, "empty_loader"):
        Checkpointable(CHAIN, DataLoader(TensorDataset(DATA[:0])), mem_limit="1GB")
