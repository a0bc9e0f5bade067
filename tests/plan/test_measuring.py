"""What a model is measured with, what is logged meanwhile, and what the caller has around it."""

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.data import DataLoader, TensorDataset

from rotor_py import Checkpointable, UnsupportedModelError
from tests.fields import kinds, logged, raises

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


def test_samples_that_are_none_are_told_in_one_sentence_and_a_limit_may_be_a_float() -> None:
    for sample in ((DATA[:4], DATA[:4]), loader(DATA, DATA)):
        with raises(UnsupportedModelError, "too_many_arguments", got=2):  # targets beside the input
            Checkpointable(CHAIN, sample, mem_limit="1GB")
        Checkpointable(Product(), sample, mem_limit="1GB")  # takes two
    for limit in ("1GB", 1e9, 10**9):
        with raises(UnsupportedModelError, "not_a_sample"):
            Checkpointable(CHAIN, limit)
    with raises(UnsupportedModelError, "empty_loader"):
        Checkpointable(CHAIN, DataLoader(TensorDataset(DATA[:0])), mem_limit="1GB")
    found = Checkpointable(CHAIN, DATA[:4], mem_limit=1e9)
    assert found.mem_limit == 10**9
    assert found.sequence is not None


def messages(caplog, **options: Any) -> list[tuple[int, str]]:
    """Levels and lines that a first step of four layers logs."""
    model = Checkpointable(nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), mem_limit="1GB", **options)
    with caplog.at_level(logging.INFO, "rotor_py"):
        model(torch.randn(4, 8)).sum().backward()
    return [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "rotor_py"]


def test_measuring_begins_and_ends_with_a_line(caplog) -> None:
    for options in ({"progress": False}, {}):
        caplog.clear()
        assert [level for level, _ in messages(caplog, **options)] == [logging.INFO] * 3
    assert kinds(caplog) == ["planning", "measuring", "measured"]
    assert logged(caplog, "planning", name="Sequential")
    assert logged(caplog, "measured", stages=4)
    for options in ({"progress": True}, {"verbosity": 1}):  # shown without setting up logging
        caplog.clear()
        assert [level for level, _ in messages(caplog, **options)][:3] == [logging.WARNING] * 3


def test_a_profiler_that_measuring_ends_is_told_of(caplog) -> None:
    model = Checkpointable(CHAIN, loss=torch.sum)
    with caplog.at_level(logging.WARNING, "rotor_py"), torch.profiler.profile():
        model.measure(DATA)
    assert logged(caplog, "profiler_lost")
    caplog.clear()
    with torch.profiler.profile() as profile:
        model(DATA).sum().backward()
    assert not logged(caplog, "profiler_lost")
    assert any("addmm" in event.key for event in profile.key_averages())


def test_hooks_see_nothing_of_planning_and_all_that_comes_after_it() -> None:
    seen: list[str] = []

    def hooks(name: str) -> saved_tensors_hooks:
        return saved_tensors_hooks(lambda tensor: seen.append(name) or tensor, lambda tensor: tensor)

    value, planned = torch.ones(2, requires_grad=True), Checkpointable(CHAIN)
    with hooks("outer"):
        with hooks("inner"):
            planned.measure(DATA)
            with pytest.raises(RuntimeError, match="shape"):
                planned.measure(DATA[:, :3])
            assert seen == []
            value.exp()
        value.exp()
    assert seen == ["inner", "outer"]
