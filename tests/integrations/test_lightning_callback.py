"""`lightning.Trainer(callbacks=[MemoryLimit(...)])`: a LightningModule as it is, and its network planned."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.measure.step_memory import recomputes
from tests.checkpointable.steps import images
from tests.fields import raises
from tests.integrations.runs import assert_same_weights, halfway, run_peak
from tests.integrations.test_lightning import (
    BATCHES,
    Classifier,
    Whole,
    batches,
    entropy,
    lightning,
    limit,
    network,
    trainer,
)

from rotor_py.integrations.lightning_callback import MemoryLimit  # isort: skip  # after the import that may skip

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers", "ignore:.*isinstance.treespec, LeafSpec.*", "ignore:.*no `val_dataloader`"
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"accumulate_grad_batches": 2}, marks=pytest.mark.slow),
        pytest.param({"precision": "bf16-mixed"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_is_the_plain_run_and_leaves_the_plain_module(options: dict[str, Any], tmp_path: Path) -> None:
    callback = MemoryLimit(limit(), loss=entropy)
    plain, planned = Classifier(network()), Classifier(network())
    inside = planned.network
    trainer(val_check_interval=2, **options).fit(plain, batches(), batches())
    run = trainer(val_check_interval=2, callbacks=[callback], **options)
    run.fit(planned, batches(), batches())
    run.save_checkpoint(tmp_path / "last.ckpt")
    assert planned.losses == plain.losses
    assert_same_weights(planned, plain)
    assert recomputes(callback.planned.sequence) or "precision" in options  # activations are half as large in bfloat16
    assert planned.network is inside
    assert "forward" not in inside.__dict__
    again = Classifier(network())
    again.load_state_dict(torch.load(tmp_path / "last.ckpt")["state_dict"])
    assert_same_weights(again, plain)


def test_a_run_stays_inside_the_limit() -> None:
    most = limit()
    callback, module = MemoryLimit(most, loss=entropy), Classifier(network())
    trainer(callbacks=[callback]).fit(module, batches())
    assert run_peak(lambda: trainer(callbacks=[callback]).fit(module, batches()), module, BATCHES[0]) <= most
    assert recomputes(callback.planned.sequence)


def test_a_module_whose_training_step_calls_itself_is_planned_by_the_empty_name() -> None:
    plain, module = Whole(network()), Whole(network())
    most = halfway(
        Checkpointable(copy.deepcopy(module), images(), loss=entropy, optimizer=plain.configure_optimizers())
    )
    callback = MemoryLimit(most, network="", loss=entropy)
    trainer().fit(plain, batches())
    trainer(callbacks=[callback]).fit(module, batches())
    assert recomputes(callback.planned.sequence)
    assert callback.planned.model is module
    assert module.losses == plain.losses
    assert_same_weights(module, plain)


def test_a_network_that_is_not_called_is_told_of_and_the_module_is_plain_again() -> None:
    module = Classifier(network())
    with raises(UnsupportedModelError, "network_not_called", name="forward"):
        trainer(callbacks=[MemoryLimit("1GB", network="")]).fit(module, batches())
    assert "forward" not in module.__dict__


class Pair(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 3))
        self.other = nn.Linear(3, 3)


def test_which_child_is_planned_is_not_guessed() -> None:
    with raises(UnsupportedModelError, "which_network"):
        trainer(callbacks=[MemoryLimit("1GB")]).fit(Pair(), batches())


def test_a_network_that_is_wrapped_already_keeps_its_own_limit() -> None:
    module = Classifier(Checkpointable(network(), mem_limit="1GB", loss=entropy))
    callback = MemoryLimit("1kB")
    trainer(max_steps=1, callbacks=[callback]).fit(module, batches())
    assert callback.planned is None
    assert module.network.sequence is not None


def test_a_copy_that_is_made_while_training_follows_a_plan_of_its_own() -> None:
    class Copying(lightning.Callback):  # type: ignore[name-defined,misc]  # Lightning may not be there
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            self.copied = copy.deepcopy(pl_module)

    copying, module = Copying(), Classifier(network())
    trainer(max_steps=1, callbacks=[MemoryLimit("1GB", loss=entropy), copying]).fit(module, batches())
    copied = copying.copied.network
    assert copied.forward.planned.model is copied
    entropy(copied(BATCHES[0])).backward()
    assert all(parameter.grad is not None for parameter in copied.parameters())
