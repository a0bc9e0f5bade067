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

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec.*", "ignore:The .grad attribute of a Tensor", "ignore:.*pin_memory"
)
LENGTH, BATCH = 40, 4


def llama(layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=96, num_hidden_layers=layers, tie_word_embeddings=True, **sizes)
    return transformers.LlamaForCausalLM(config)


def bert(layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=96, num_hidden_layers=layers, num_labels=3, **sizes)
    return transformers.BertForSequenceClassification(config)


def examples(count: int = 24, *, classes: int | None = None, masked: bool = False) -> list[dict[str, Any]]:
    """Padded sequences, and a column that no model takes. Capturing a model with masks takes a third longer."""
    drawn, found = torch.Generator().manual_seed(1), []
    for index in range(count):
        ids = torch.randint(1, 96, (LENGTH,), generator=drawn)
        mask = (torch.arange(LENGTH) < LENGTH - 1 - index % 5).long()
        labels = index % classes if classes else ids.masked_fill(mask == 0, -100)
        masks = {"attention_mask": mask} if masked else {}
        found.append({"input_ids": ids * mask, **masks, "labels": labels, "note": index})
    return found


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


def batch(data: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    taken = {key: [torch.as_tensor(each[key]) for each in data[:BATCH]] for key in data[0] if key != "note"}
    return {key: torch.stack(values) for key, values in taken.items()}


@pytest.mark.slow
def test_a_run_is_the_plain_run_inside_the_limit_its_files_are_those_of_the_plain_model_and_it_is_resumed(
    tmp_path: Path,
) -> None:
    data, model = examples(classes=3, masked=True), bert()
    options = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    plain = trainer(bert(), tmp_path / "plain", data, **options)
    plain.train()
    limit = halfway(Checkpointable(bert(), batch(data), optimizer=torch.optim.AdamW(model.parameters())))
    planned = trainer(Checkpointable(model, mem_limit=limit), tmp_path / "planned", data, **options)
    planned.train()
    assert recomputes(planned.model.sequence)
    assert history(planned) == history(plain)
    assert_same_weights(planned.model, plain.model)
    for name in ("label_names", "_signature_columns", "model_accepts_loss_kwargs"):
        assert getattr(planned, name) == getattr(plain, name)
    planned.args.eval_strategy = planned.args.save_strategy = "no"
    assert run_peak(planned.train, planned.model) <= limit
    assert_same_files(tmp_path, plain.model)
    for again in (Checkpointable(bert(), mem_limit="1GB"), bert()):
        resumed = trainer(again, tmp_path / "resumed", data, **options)
        resumed.train(resume_from_checkpoint=str(tmp_path / "planned" / "checkpoint-2"))
        assert_same_weights(resumed.model, plain.model)


def assert_same_files(folder: Path, model: torch.nn.Module) -> None:
    names = {file.name for file in (folder / "plain" / "checkpoint-2").iterdir()}
    assert {file.name for file in (folder / "planned" / "checkpoint-2").iterdir()} == names
    assert_same_weights(type(model).from_pretrained(folder / "planned" / "checkpoint-3"), model)


@pytest.mark.slow
def test_accumulated_and_smoothed_runs_under_autocast_are_the_plain_run_also_of_a_model_that_the_trainer_makes(
    tmp_path: Path,
) -> None:
    data, callback = examples(), MemoryLimit("730kB")
    options = {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "bf16": True, "max_steps": 2}
    runs = [trainer(each, tmp_path, data, **options) for each in (llama(1), Checkpointable(llama(1), mem_limit="1GB"))]
    made = {"train_dataset": data, "model_init": lambda: llama(1), "callbacks": [callback]}
    runs.append(transformers.Trainer(args=runs[0].args, **made))
    for run in runs:
        run.train()
        assert history(run) == history(runs[0])
        assert_same_weights(run.model, runs[0].model)
    assert recomputes(callback.planned.sequence)
    assert callback.planned.model is runs[2].model


def test_steps_in_the_backward_are_those_of_plain_training_without_norms_and_clipping_is_refused(
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


def limited(model: torch.nn.Module, folder: Path, data: Any, limit: float | str, **options: Any) -> tuple[Any, Any]:
    run, callback = trainer(model, folder, data, **options), MemoryLimit(limit)
    run.add_callback(callback)
    return run, callback


def test_a_run_with_the_callback_is_the_plain_run_inside_the_limit_and_leaves_the_plain_model(
    tmp_path: Path,
) -> None:
    data = examples(classes=3)
    options = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    model = bert(1)
    plain = trainer(copy.deepcopy(model), tmp_path / "plain", data, **options)
    plain.train()
    adamw = torch.optim.AdamW(model.parameters())
    limit = halfway(Checkpointable(copy.deepcopy(model), batch(data), optimizer=adamw))
    run, callback = limited(model, tmp_path / "planned", data, limit, **options)
    assert run_peak(run.train, model) <= limit
    assert callback.planned.budget.peak_bytes(store_all(callback.planned.chain)) > limit
    assert history(run) == history(plain)
    assert run.model is model
    assert "forward" not in model.__dict__
    assert_same_weights(model, plain.model)
    assert_same_files(tmp_path, model)


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
