"""A LightningModule whose network is planned: wrapped as a `Checkpointable`, or by the callback `MemoryLimit`."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.measure.budget import recomputes
from rotor_py.plan.step_in_backward import SpentGradientError
from tests.checkpointable.steps import images
from tests.fields import raises
from tests.integrations.runs import BATCHES, assert_same_weights, entropy, halfway, network, run_peak

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    lightning = pytest.importorskip("lightning")

from rotor_py.integrations.lightning_callback import MemoryLimit  # isort: skip  # after the import that may skip

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*isinstance.treespec, LeafSpec.*", "ignore:.*no `val_dataloader`"
)


class Classifier(lightning.LightningModule):
    """Of a `whole` one, `training_step` calls the module itself, as Lightning's own examples do."""

    def __init__(self, model: nn.Module, *, whole: bool = False, optimizer: Any = None) -> None:
        super().__init__()
        self.network, self.whole, self.chosen = model, whole, optimizer
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        loss = entropy(self(batch) if self.whole else self.network(batch))
        self.losses.append(loss.item())
        return loss

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.network(batch)

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        assert not self.network.training
        self.losses.append(entropy(self.network(batch)).item())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.chosen or torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches() -> Any:
    """An epoch of four; they are there already, so that the memory of a run is that of its steps."""
    return torch.utils.data.DataLoader(BATCHES, batch_size=None)


def trainer(**options: Any) -> Any:
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return lightning.Trainer(accelerator="cpu", **{"max_steps": 4, **quiet, **options})


class Run:
    """A run of Lightning inside a limit that bites, by a wrapped network or a callback; `whole` plans the module."""

    def __init__(self, by: str, *, whole: bool = False, **options: Any) -> None:
        self.plain = Classifier(network(), whole=whole)
        model = copy.deepcopy(self.plain if whole else self.plain.network)
        adamw = torch.optim.AdamW(model.parameters())
        self.most = halfway(Checkpointable(model, images(), loss=entropy, optimizer=adamw))
        self.module, self.options = copy.deepcopy(self.plain), options
        self._callback = MemoryLimit(self.most, network="" if whole else None, loss=entropy)
        if by == "wrapped" and whole:
            self.module = Checkpointable(self.module, mem_limit=self.most, loss=entropy)
        elif by == "wrapped":
            self.module.network = Checkpointable(self.module.network, mem_limit=self.most, loss=entropy)
        else:
            self.options = {"callbacks": [self._callback], **options}

    @property
    def planned(self) -> Any:
        found = self._callback.planned or self.module
        return found if isinstance(found, Checkpointable) else self.module.network

    def fit(self, *given: Any) -> Any:
        run = trainer(**self.options)
        run.fit(self.module, batches(), *given)
        return run


class Copying(lightning.Callback):  # type: ignore[name-defined,misc]  # Lightning may not be there
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.copied = copy.deepcopy(pl_module)


@pytest.mark.parametrize(
    ("by", "options"), [("wrapped", {}), ("callback", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5})]
)
def test_a_run_is_the_plain_run_a_callback_leaves_the_plain_module_and_a_copy_has_a_plan(by, options, tmp_path) -> None:
    run, copying = Run(by, val_check_interval=2, **options), Copying()
    run.options["callbacks"] = [*run.options.get("callbacks", []), copying]
    inside = run.module.network
    trainer(val_check_interval=2, **options).fit(run.plain, batches(), batches())
    run.fit(batches()).save_checkpoint(tmp_path / "last.ckpt")
    assert run.module.losses == run.plain.losses
    assert_same_weights(run.module, run.plain)
    assert recomputes(run.planned.sequence)
    assert run.module.network is inside
    assert "forward" not in inside.__dict__
    again = Classifier(network())
    again.load_state_dict(torch.load(tmp_path / "last.ckpt")["state_dict"])
    assert_same_weights(again, run.plain)
    copied = copying.copied.network
    assert by == "wrapped" or copied.forward.planned.model is copied
    entropy(copied(BATCHES[0])).backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())


@pytest.mark.parametrize("by", ["wrapped", "callback"])
def test_a_run_whose_whole_module_is_planned_stays_inside_the_limit(by: str) -> None:
    run = Run(by, whole=True)
    trainer().fit(run.plain, batches())
    run.fit()
    assert run.module.losses == run.plain.losses
    assert_same_weights(run.module, run.plain)
    assert recomputes(run.planned.sequence)
    assert run_peak(run.fit, run.module, BATCHES[0]) <= run.most


def test_a_checkpoint_is_resumed_with_a_plan_or_without_one(tmp_path: Path) -> None:
    run = Run("wrapped", max_steps=-1, max_epochs=1)
    run.fit().save_checkpoint(tmp_path / "last.ckpt")
    trainer(max_steps=-1, max_epochs=2).fit(run.plain, batches())
    for model in (network(), Checkpointable(network(), mem_limit="1GB", loss=entropy)):
        resumed = Classifier(model)
        trainer(max_steps=-1, max_epochs=2).fit(resumed, batches(), ckpt_path=tmp_path / "last.ckpt")
        assert_same_weights(resumed, run.plain)


def test_a_network_that_is_not_called_is_told_of_and_which_child_is_planned_is_not_guessed() -> None:
    module = Classifier(network())
    with raises(UnsupportedModelError, "network_not_called", name="forward"):
        trainer(callbacks=[MemoryLimit("1GB", network="")]).fit(module, batches())
    assert "forward" not in module.__dict__
    module = Classifier(nn.Linear(3, 3))
    module.other = nn.Linear(3, 3)
    with raises(UnsupportedModelError, "which_network"):
        trainer(callbacks=[MemoryLimit("1GB")]).fit(module, batches())


def test_steps_in_the_backward_are_those_of_plain_training_and_clipping_or_accumulating_is_refused() -> None:
    def fit(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> None:
        trainer(log_every_n_steps=1, **options).fit(Classifier(model, optimizer=optimizer), batches())

    model = network()
    plain = copy.deepcopy(model)
    fit(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    planned = Checkpointable(model, mem_limit="1GB", loss=entropy, step_in_backward=optimizer)
    fit(planned, optimizer)
    assert_same_weights(planned, plain)
    with raises(SpentGradientError, "gradient_spent"):
        fit(planned, optimizer, gradient_clip_val=1.0)
    optimizer.zero_grad()
    planned = Checkpointable(model, mem_limit="1GB", loss=entropy, step_in_backward=optimizer)
    with raises(RuntimeError, "second_backward"):
        fit(planned, optimizer, accumulate_grad_batches=2)
