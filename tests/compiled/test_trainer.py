"""transformers' `Trainer` with `torch_compile=True`, which puts torch.compile around the model that it is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from rotor_py import Checkpointable
from tests.integrations.test_trainer import examples, llama, trainer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:.*isinstance.treespec, LeafSpec.*", "ignore:The .grad attribute of a Tensor", "ignore:.*pin_memory"
    ),
]


def test_a_trainer_that_compiles_compiles_the_stages(tmp_path: Path) -> None:
    found = Checkpointable(llama(), mem_limit="1GB", granularity=3)
    trainer(found, tmp_path, examples(), torch_compile=True).train()
    assert found._planner.settings.inductor == ()
    assert len(found._planner.in_use.ways) > 1


def test_a_trainer_that_asks_for_cuda_graphs_is_told_why_not(tmp_path: Path) -> None:
    found = Checkpointable(llama(), mem_limit="1GB", granularity=3)
    with pytest.raises(ValueError, match="records CUDA graphs, which keep their memory for good"):
        trainer(found, tmp_path, examples(), torch_compile=True, torch_compile_mode="reduce-overhead").train()
