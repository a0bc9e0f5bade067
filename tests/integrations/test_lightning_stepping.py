"""Lightning runs forward and backward inside of `optimizer.step(closure)`: these step in the backward as well."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.plan.step_in_backward import SpentGradientError
from tests.fields import raises
from tests.integrations.runs import assert_same_weights
from tests.training.stepping import chain, square

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")

pytestmark = pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*treespec, LeafSpec.*")


class Module(lightning.LightningModule):
    """`optimizer` is made by the caller, of the parameters of `network`."""

    def __init__(self, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.network, self.chosen = network, [optimizer]

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        return square(self.network(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.chosen[0]


def fit(network: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    data = torch.utils.data.DataLoader(torch.randn(12, 16, generator=torch.Generator().manual_seed(1)), batch_size=4)
    runs = lightning.Trainer(max_epochs=1, enable_model_summary=False, log_every_n_steps=1, **quiet, **options)
    runs.fit(Module(network, optimizer), data)


def test_lightning_trains_as_ever_and_is_told_where_it_clips_or_accumulates() -> None:
    model = chain(3, 16)
    plain = copy.deepcopy(model)
    fit(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    planned = Checkpointable(model, mem_limit="1GB", step_in_backward=optimizer)
    fit(planned, optimizer)
    assert_same_weights(planned, plain)
    with raises(SpentGradientError, "gradient_spent"):
        fit(planned, optimizer, gradient_clip_val=1.0)
    optimizer.zero_grad()
    planned = Checkpointable(model, mem_limit="1GB", step_in_backward=optimizer)
    with raises(RuntimeError, "second_backward"):
        fit(planned, optimizer, accumulate_grad_batches=2)
