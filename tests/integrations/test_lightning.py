"""A LightningModule whose network is a `Checkpointable`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.measure.step_memory import recomputes
from tests.checkpointable.steps import blocks, images
from tests.integrations.runs import assert_same_weights, halfway, run_peak

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*isinstance.treespec, LeafSpec.*", "ignore:.*no `val_dataloader`"
)

BATCHES = list(torch.randn(4, 4, 3, 24, 24, generator=torch.Generator().manual_seed(1)))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return blocks(4, 12)


def entropy(output: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, torch.arange(len(output)))


def limit() -> int:
    model = network()
    return halfway(Checkpointable(model, images(), loss=entropy, optimizer=torch.optim.AdamW(model.parameters())))


class Classifier(lightning.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.network = model
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = entropy(self.network(batch))
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        assert not self.network.training
        self.losses.append(entropy(self.network(batch)).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches() -> Any:
    """An epoch of four; they are there already, so that the memory of a run is that of its steps."""
    return torch.utils.data.DataLoader(BATCHES, batch_size=None)


def trainer(**options: Any) -> Any:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(accelerator="cpu", **{"max_steps": 4, **quiet, **options})


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}, {"precision": "bf16-mixed"}]
)
def test_a_run_is_the_plain_run(options: dict[str, Any]) -> None:
    plain, planned = Classifier(network()), Classifier(Checkpointable(network(), mem_limit=limit(), loss=entropy))
    for module in (plain, planned):
        trainer(val_check_interval=2, **options).fit(module, batches(), batches())
    assert planned.losses == plain.losses
    assert_same_weights(planned, plain)
    assert recomputes(planned.network.sequence) or "precision" in options  # activations are half as large in bfloat16


def test_a_run_stays_inside_the_limit() -> None:
    most = limit()
    module = Classifier(Checkpointable(network(), mem_limit=most, loss=entropy))
    trainer().fit(module, batches())
    assert recomputes(module.network.sequence)
    assert run_peak(lambda: trainer().fit(module, batches()), module, BATCHES[0]) <= most


def test_a_checkpoint_is_resumed_with_a_plan_or_without_one(tmp_path: Path) -> None:
    whole = Classifier(Checkpointable(network(), mem_limit=limit(), loss=entropy))
    first = trainer(max_steps=-1, max_epochs=1)
    first.fit(whole, batches())
    first.save_checkpoint(tmp_path / "last.ckpt")
    plain = Classifier(network())
    trainer(max_steps=-1, max_epochs=2).fit(plain, batches())
    for model in (network(), Checkpointable(network(), mem_limit="1GB", loss=entropy)):
        resumed = Classifier(model)
        trainer(max_steps=-1, max_epochs=2).fit(resumed, batches(), ckpt_path=tmp_path / "last.ckpt")
        assert_same_weights(resumed, plain)


class Whole(Classifier):
    """One whose `training_step` calls the module itself, as Lightning's own examples do."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.network(batch)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = entropy(self(batch))
        self.losses.append(loss.item())
        return loss


def test_a_whole_lightning_module_is_planned() -> None:
    plain, model = Whole(network()), Whole(network())
    most = halfway(Checkpointable(model, images(), loss=entropy, optimizer=model.configure_optimizers()))
    planned = Checkpointable(model, mem_limit=most, loss=entropy)
    for module in (plain, planned):
        trainer().fit(module, batches())
    assert planned.losses == plain.losses
    assert_same_weights(planned, plain)
    assert recomputes(planned.sequence)
    assert run_peak(lambda: trainer().fit(planned, batches()), planned, BATCHES[0]) <= most
