"""Models of transformers and a U-Net, unchanged: same numbers, inside the limit, as predicted."""

from __future__ import annotations

import copy
import sys
from pathlib import Path

import pytest
import torch

from rotor_py import Checkpointable
from tests.capture.steps import adamw, compare, limits

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
ecosystem = pytest.importorskip("ecosystem")
pytest.importorskip("transformers")


SLOW = ("BERT", "GPT-2", "Mixtral", "ResNet", "Swin", "T5", "Whisper")
"""What else they have to show, others show in less time: a decoder, convolutions, a vision transformer, an encoder."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ecosystem.MODELS]
)
def test_a_model_trains_inside_a_limit_with_the_same_numbers(name: str) -> None:
    torch.manual_seed(0)
    model, inputs, loss = ecosystem.MODELS[name]()
    plain = copy.deepcopy(model.train())
    planned = Checkpointable(model, loss=loss, optimizer=adamw(model), fresh_grads=True)
    planned.measure(inputs)
    least, whole = limits(planned)
    assert least < whole
    for limit in ((least + whole) // 2, least)[: 2 if name in ("Llama", "U-Net") else 1]:
        planned.compute_sequence(limit)
        predicted = planned.budget.peak_bytes(planned.sequence)
        measured = compare(planned, plain, inputs, loss)
        assert measured <= limit
        assert abs(measured - predicted) <= 0.03 * predicted
