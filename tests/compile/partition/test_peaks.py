"""Measured peaks under `aot_eager`, for several budgets: never over them, and never rising as they fall."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.compile.partition.compiled_steps import Block, Residual, compiled_step, seen_candidates

WIDTH = 16
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "softmax": lambda: nn.Softmax(-1),
    "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.SiLU(), nn.Linear(4 * WIDTH, WIDTH)),
    "residual": lambda: Residual(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)),
}
CHAIN = ("linear", "gelu", "dropout", "norm") * 2
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "chain": (lambda: nn.Sequential(*(LAYERS[name]() for name in CHAIN)), (256, WIDTH)),
    "llama": (lambda: nn.Sequential(*(Block(16) for _ in range(2))), (2, 64, 16)),
}


@pytest.mark.parametrize(
    "name",
    ["chain", pytest.param("llama", marks=pytest.mark.slow)],
)
def test_peaks_are_the_predicted_ones_to_the_byte_fall_with_budgets_and_numbers_stay(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, shape = MODELS[name]
    torch.manual_seed(2)
    value = torch.randn(shape)
    with seen_candidates(monkeypatch) as found:
        stored = compiled_step(made, value, 10**12)
    peaks = [each.weight.peak for each in found[0]]
    assert peaks == sorted(set(peaks))
    assert peaks[0] < 0.9 * peaks[-1]
    for peak in (peaks[0], peaks[len(peaks) // 2]):
        step = compiled_step(made, value, peak)
        assert step.peak == peak
        assert step.equals(stored)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(layers=st.lists(st.sampled_from(sorted(LAYERS)), min_size=3, max_size=8), place=st.floats(0, 1))
def test_any_model_stays_within_any_budget_that_it_can(layers: list[str], place: float) -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(LAYERS[name]() for name in layers))

    torch.manual_seed(2)
    value = torch.randn(64, WIDTH)
    with pytest.MonkeyPatch.context() as patch, seen_candidates(patch) as found:
        stored = compiled_step(made, value, 10**12)
    least, most = found[0][0].weight.peak, found[0][-1].weight.peak
    budget = int(least + place * (most - least))
    step = compiled_step(made, value, budget)
    assert step.peak <= budget
    assert step.equals(stored)
