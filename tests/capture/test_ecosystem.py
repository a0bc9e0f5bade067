"""Models of transformers and a U-Net, unchanged: same numbers, inside the limit, as predicted."""

from __future__ import annotations

import copy
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from rotor_py import Checkpointable
from tests.capture.steps import adamw, compare, limits

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
ecosystem = pytest.importorskip("ecosystem")
pytest.importorskip("transformers")


def small_unet() -> ecosystem.Case:
    _, inputs, loss = ecosystem.unet(batch=2)
    return ecosystem.UNet(width=8, levels=2), inputs, loss


SMALL = {
    "small Llama": partial(ecosystem.llama, width=64, layers=2, length=32),
    "small ViT": partial(ecosystem.vit, layers=2, batch=4),
    "small U-Net": small_unet,
}
"""A decoder, an encoder of pictures, and convolutions with skip connections: what the larger ones show as well."""
CASES = {**SMALL, **ecosystem.MODELS}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [name if name in SMALL else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_model_trains_inside_a_limit_with_the_same_numbers(name: str) -> None:
    torch.manual_seed(0)
    model, inputs, loss = CASES[name]()
    plain = copy.deepcopy(model.train())
    planned = Checkpointable(model, loss=loss, optimizer=adamw(model), fresh_grads=True)
    planned.measure(inputs)
    least, whole = limits(planned)
    assert least < whole
    for limit in ((least + whole) // 2, least)[: 2 if name.endswith("U-Net") else 1]:
        planned.compute_sequence(limit)
        predicted = planned.budget.peak_bytes(planned.sequence)
        measured = compare(planned, plain, inputs, loss)
        assert measured <= limit
        assert abs(measured - predicted) <= 0.03 * predicted
