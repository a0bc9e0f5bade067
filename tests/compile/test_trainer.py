"""transformers' `Trainer` with `torch_compile=True`, which puts torch.compile around the model that it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from rotor_py import Checkpointable
from tests.fields import logged
from tests.integrations.test_trainer import assert_same_weights, examples, llama, trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:.*isinstance.treespec, LeafSpec.*", "ignore:The .grad attribute of a Tensor", "ignore:.*pin_memory"
    ),
]


def test_a_trainer_that_compiles_trains_uncompiled_and_is_told_unless_the_model_asks_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, found = llama(), Checkpointable(llama(), mem_limit="1GB", granularity=3)
    trainer(plain, tmp_path / "plain", examples()).train()
    trainer(found, tmp_path / "planned", examples(), torch_compile=True).train()
    assert found.sequence is not None
    assert len(logged(caplog, "compile_ignored", name="torch.compile")) == 1
    assert_same_weights(found, plain)
    asked = Checkpointable(llama(), mem_limit="1GB", granularity=3, compile=True)
    trainer(asked, tmp_path, examples()).train()
    assert len(asked._planner.in_use.ways) > 1
