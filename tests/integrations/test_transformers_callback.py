"""transformers' `Trainer` with `callbacks=[MemoryLimit(...)]`: the trainer has the plain model, and plans it."""

from __future__ import annotations

import copy
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rotor_py import Checkpointable, UnsupportedModelError
from rotor_py.measure.budget import recomputes
from tests.fields import raises
from tests.integrations.runs import assert_same_weights, halfway, run_peak
from tests.integrations.test_trainer import batch, bert, examples, history, llama, trainer

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from rotor_py.integrations.transformers_callback import MemoryLimit  # noqa: E402  # it needs the library

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec.*", "ignore:The .grad attribute of a Tensor", "ignore:.*pin_memory"
)


def limited(model: torch.nn.Module, folder: Path, data: Any, limit: float | str, **options: Any) -> tuple[Any, Any]:
    run, callback = trainer(model, folder, data, **options), MemoryLimit(limit)
    run.add_callback(callback)
    return run, callback


def test_a_run_is_the_plain_run_stays_inside_the_limit_and_leaves_the_plain_model(tmp_path: Path) -> None:
    # Masks take a third of the time, and are in the tests of `Trainer` with a `Checkpointable`.
    data = [{name: each[name] for name in ("input_ids", "labels")} for each in examples(classes=3)]
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    plain = trainer(bert(), tmp_path / "plain", data, **options)
    plain.train()
    model = bert()
    adamw = torch.optim.AdamW(model.parameters())
    limit = halfway(Checkpointable(copy.deepcopy(model), batch(data), optimizer=adamw))
    run, callback = limited(model, tmp_path / "planned", data, limit, **options)
    run.train()
    assert recomputes(callback.planned.sequence)
    assert history(run) == history(plain)
    assert run.model is model
    assert "forward" not in model.__dict__
    assert_same_weights(model, plain.model)
    names = {file.name for file in (tmp_path / "plain" / "checkpoint-2").iterdir()}
    assert {file.name for file in (tmp_path / "planned" / "checkpoint-2").iterdir()} == names
    assert_same_weights(type(model).from_pretrained(tmp_path / "planned" / "checkpoint-3"), model)
    run.args.eval_strategy = run.args.save_strategy = "no"
    assert run_peak(run.train, model) <= limit


@pytest.mark.slow
def test_a_model_that_the_trainer_makes_is_planned_under_its_autocast(tmp_path: Path) -> None:
    data, runs = examples(), []
    options = {"gradient_accumulation_steps": 2, "bf16": True, "max_steps": 2}
    for callbacks in ([], [MemoryLimit("730kB")]):
        arguments = trainer(llama(), tmp_path, data, **options).args
        made = transformers.Trainer(
            args=arguments, train_dataset=data, model_init=lambda: llama(1), callbacks=callbacks
        )
        made.train()
        runs.append(made)
    assert recomputes(callbacks[0].planned.sequence)
    assert callbacks[0].planned.model is runs[1].model
    assert history(runs[1]) == history(runs[0])
    assert_same_weights(runs[1].model, runs[0].model)


def test_an_error_leaves_a_model_that_goes_on_by_its_plan_until_end_is_called(tmp_path: Path) -> None:
    class Failing(transformers.TrainerCallback):  # type: ignore[misc]  # transformers may not be there
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("of the user")

    model = llama(1)
    run, callback = limited(model, tmp_path, examples(), "1GB")
    signature = inspect.signature(model.forward)
    run.add_callback(Failing())
    with pytest.raises(RuntimeError, match="of the user"):
        run.train()
    assert inspect.signature(model.forward) == signature
    first = callback.planned
    run.remove_callback(Failing)
    run.train()
    assert callback.planned is first
    assert "forward" not in model.__dict__


def test_one_process_with_several_devices_is_refused_and_a_limit_that_is_none() -> None:
    with raises(ValueError, "not_a_size"):
        MemoryLimit("four")
    arguments: Any = SimpleNamespace(n_gpu=2)
    with raises(UnsupportedModelError, "several_devices", devices=2):
        MemoryLimit("1GB").on_train_begin(arguments, None, None, model=torch.nn.Linear(1, 1))  # type: ignore[arg-type]  # not looked at


@pytest.mark.parametrize("library", ["transformers", "lightning", "accelerate"])
def test_a_library_that_is_missing_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = "hook" if library == "accelerate" else "callback"
    name = f"rotor_py.integrations.{library}_{kind}"
    for module in [each for each in sys.modules if each in (library, name) or each.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ModuleNotFoundError, match=f"not installed: pip install .*{library}"):
        __import__(name)
