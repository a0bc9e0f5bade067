from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, Report, store_all

EVIL = "<script>[b]&'"


@pytest.fixture(scope="package")
def model() -> Checkpointable:
    """A plan of twelve stages that has to recompute; the name of one module has to be escaped."""
    torch.manual_seed(0)
    names = ["first", "second", EVIL, "fourth", "fifth", "last"]
    layers = OrderedDict((name, nn.Sequential(nn.Linear(64, 64), nn.Tanh())) for name in names)
    model = Checkpointable(nn.Sequential(layers), loss=lambda output: output.square().mean())
    model.measure(torch.randn(256, 64))
    assert model.budget is not None
    least, most = model.budget.least_bytes(), model.budget.peak_bytes(store_all(model.budget.chain))
    model.compute_sequence(int(least + 0.4 * (most - least)))
    return model


@pytest.fixture(scope="package")
def report(model: Checkpointable) -> Report:
    return model.report()
