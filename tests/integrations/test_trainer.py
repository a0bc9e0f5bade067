"""transformers' `Trainer` with `model=Checkpointable(model, mem_limit=...)`, or with `callbacks=[MemoryLimit(...)]`."""

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
from rotor_py.plan.step_in_backward import SpentGradientError
from rotor_solver import store_all
from tests.fields import raises
from tests.integrations.runs import assert_same_weights, halfway, run_peak

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from rotor_py.integrations.transformers_callback import MemoryLimit  # noqa: E402  # it needs the library

pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*", "ignore:.*pin_memory")
BATCH = 4


class Small(transformers.PreTrainedModel):  # type: ignore[misc]  # transformers may not be there
    """A classifier like those of the library, captured in a fraction of the time."""

    config_class = transformers.PretrainedConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config or transformers.PretrainedConfig())
        torch.manual_seed(0)
        self.embedding, self.head = torch.nn.Embedding(96, 32), torch.nn.Linear(32, 3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(32, 32) for _ in range(6))
        self.post_init()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        value = self.embedding(input_ids)
        for layer in self.layers:
            value = value + torch.nn.functional.gelu(layer(value))
        logits = self.head(value.mean(1))
        loss = {} if labels is None else {"loss": torch.nn.functional.cross_entropy(logits, labels)}
        return {**loss, "logits": logits}


def examples() -> list[dict[str, Any]]:
    """With a column that no model takes."""
    ids = torch.randint(1, 96, (24, 40), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": index % 3, "note": index} for index, each in enumerate(ids)]


def trainer(model: torch.nn.Module, folder: Path, data: list[dict[str, Any]], **options: Any) -> Any:
    sizes = dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), BATCH)
    given = {"max_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "save_strategy": "no", **sizes, **options}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(output_dir=str(folder), **given, **quiet)
    return transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:BATCH])


def history(run: Any) -> list[dict[str, float]]:
    """Losses and norms of gradients, of training and evaluation."""
    kept = ("loss", "grad_norm", "eval_loss")
    return [{key: entry[key] for key in kept if key in entry} for entry in run.state.log_history]


def limit_for(*columns: str) -> int:
    """A limit that bites for a batch of these columns."""
    given = {name: torch.stack([torch.as_tensor(each[name]) for each in examples()[:BATCH]]) for name in columns}
    model = Small()
    return halfway(Checkpointable(model, given, optimizer=torch.optim.AdamW(model.parameters())))


@pytest.mark.parametrize("by", ["wrapped", "callback"])
def test_a_run_is_the_plain_run_inside_the_limit_with_its_files_and_is_resumed(by: str, tmp_path: Path) -> None:
    data, model, limit, wrapped = examples(), Small(), limit_for("input_ids", "labels"), by == "wrapped"
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    plain = trainer(Small(), tmp_path / "plain", data, **options)
    plain.train()
    run = trainer(Checkpointable(model, mem_limit=limit) if wrapped else model, tmp_path / by, data, **options)
    callback = MemoryLimit(limit)
    if not wrapped:
        run.add_callback(callback)
    assert run_peak(run.train, model) <= limit
    planned = callback.planned or run.model
    assert planned.budget.peak_bytes(store_all(planned.chain)) > limit
    assert history(run) == history(plain)
    for name in ("label_names", "_signature_columns", "model_accepts_loss_kwargs"):
        assert getattr(run, name) == getattr(plain, name)
    assert_same_weights(run.model, plain.model)
    assert wrapped or run.model is model
    assert "forward" not in model.__dict__
    files = [{file.name for file in (tmp_path / each / "checkpoint-2").iterdir()} for each in ("plain", by)]
    assert files[0] == files[1]
    assert_same_weights(Small.from_pretrained(tmp_path / by / "checkpoint-3"), plain.model)
    other = Small() if wrapped else Checkpointable(Small(), mem_limit="1GB")
    resumed = trainer(other, tmp_path / "resumed", data, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / by / "checkpoint-2"))
    assert_same_weights(resumed.model, plain.model)


def test_accumulated_and_smoothed_runs_under_autocast_are_plain_also_of_a_model_of_the_trainer(tmp_path: Path) -> None:
    data = examples()
    with torch.autocast("cpu", torch.bfloat16):
        callback = MemoryLimit(limit_for("input_ids"))  # of which the smoothed loss is made outside of the model
    options = {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "bf16": True, "max_steps": 2}
    runs = [trainer(each, tmp_path, data, **options) for each in (Small(), Checkpointable(Small(), mem_limit="1GB"))]
    runs.append(transformers.Trainer(args=runs[0].args, train_dataset=data, model_init=Small, callbacks=[callback]))
    for run in runs:
        run.train()
        assert history(run) == history(runs[0])
        assert_same_weights(run.model, runs[0].model)
    assert recomputes(callback.planned.sequence)
    assert callback.planned.model is runs[2].model


def test_steps_in_the_backward_are_plain_without_norms_and_clipping_is_refused(tmp_path: Path, monkeypatch) -> None:
    model, data = Small(), examples()
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


def test_an_error_leaves_a_model_that_goes_on_by_its_plan_until_end_is_called(tmp_path: Path) -> None:
    class Failing(transformers.TrainerCallback):  # type: ignore[misc]  # transformers may not be there
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("of the user")

    model, callback = Small(), MemoryLimit("1GB")
    run = trainer(model, tmp_path, examples())
    run.add_callback(callback)
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
