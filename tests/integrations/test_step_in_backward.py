"""transformers' `Trainer` with an optimizer that steps in the backward."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from rotor_py import Checkpointable
from rotor_py.plan.step_in_backward import SpentGradientError
from tests.fields import raises
from tests.integrations.runs import assert_same_weights
from tests.integrations.test_trainer import examples, llama, trainer

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec.*", "ignore:The .grad attribute of a Tensor", "ignore:.*pin_memory"
)


def test_the_trainer_trains_as_ever_without_norms_and_is_told_that_it_clips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = llama(1), examples()
    plain = copy.deepcopy(model)

    def run(network: torch.nn.Module, optimizer: torch.optim.Optimizer, norm: float) -> None:
        made = trainer(network, tmp_path, data, max_grad_norm=norm)
        made.optimizer = optimizer
        monkeypatch.setattr(made, "_get_grad_norm", lambda model, grad_norm=None: None, raising=False)
        made.train()

    run(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    planned = Checkpointable(model, mem_limit="1GB", step_in_backward=optimizer)
    run(planned, optimizer, 0.0)
    assert_same_weights(planned, plain)
    with raises(SpentGradientError, "gradient_spent"):
        run(planned, optimizer, 1.0)
