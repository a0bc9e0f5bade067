"""transformers' `Trainer` with `model=Checkpointable(model, mem_limit=...)`, and nothing else changed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from rotor_py import Checkpointable
from rotor_py.measure.budget import recomputes
from rotor_py.plan.step_in_backward import SpentGradientError
from tests.fields import raises
from tests.integrations.runs import assert_same_weights, halfway, run_peak, weights

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*isinstance.treespec, LeafSpec.*", "ignore:The .grad attribute of a Tensor", "ignore:.*pin_memory"
)
LENGTH, BATCH = 40, 4


def llama(layers: int = 2) -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=96, num_hidden_layers=layers, tie_word_embeddings=True, **sizes)
    return transformers.LlamaForCausalLM(config)


def bert() -> torch.nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 80, "num_attention_heads": 4}
    config = transformers.BertConfig(vocab_size=96, num_hidden_layers=2, num_labels=3, **sizes)
    return transformers.BertForSequenceClassification(config)


def examples(count: int = 24, *, classes: int | None = None) -> list[dict[str, Any]]:
    """Padded sequences, and a column that no model takes."""
    drawn, found = torch.Generator().manual_seed(1), []
    for index in range(count):
        ids = torch.randint(1, 96, (LENGTH,), generator=drawn)
        mask = (torch.arange(LENGTH) < LENGTH - 1 - index % 5).long()
        labels = index % classes if classes else ids.masked_fill(mask == 0, -100)
        found.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels, "note": index})
    return found


def trainer(model: torch.nn.Module, folder: Path, data: list[dict[str, Any]], **options: Any) -> Any:
    given = {
        "max_steps": 3,
        "per_device_train_batch_size": BATCH,
        "per_device_eval_batch_size": BATCH,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    arguments = transformers.TrainingArguments(output_dir=str(folder), **given)
    return transformers.Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:BATCH])


def history(run: Any) -> list[dict[str, float]]:
    """Losses and norms of gradients, of training and evaluation."""
    kept = ("loss", "grad_norm", "eval_loss")
    return [{key: entry[key] for key in kept if key in entry} for entry in run.state.log_history]


def batch(data: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    taken = {key: [torch.as_tensor(each[key]) for each in data[:BATCH]] for key in data[0] if key != "note"}
    return {key: torch.stack(values) for key, values in taken.items()}


@pytest.mark.slow
def test_a_run_of_the_trainer_is_the_plain_run_and_stays_inside_the_limit(tmp_path: Path) -> None:
    data, make = examples(classes=3), bert
    options = {"eval_strategy": "steps", "eval_steps": 2}
    plain = trainer(make(), tmp_path, data, **options)
    plain.train()
    model = make()
    adamw = torch.optim.AdamW(model.parameters())
    limit = halfway(Checkpointable(copy.deepcopy(model), batch(data), optimizer=adamw))
    planned = trainer(Checkpointable(model, mem_limit=limit), tmp_path, data, **options)
    planned.train()
    assert recomputes(planned.model.sequence)
    assert history(planned) == history(plain)
    assert_same_weights(planned.model, plain.model)
    assert planned.label_names == plain.label_names
    assert planned._signature_columns == plain._signature_columns
    assert planned.model_accepts_loss_kwargs == plain.model_accepts_loss_kwargs
    planned.args.eval_strategy = "no"
    assert run_peak(planned.train, planned.model) <= limit


@pytest.mark.slow
def test_accumulated_gradients_smoothed_labels_and_bfloat16_are_those_of_the_plain_run(tmp_path: Path) -> None:
    data, runs = examples(), []
    options = {"gradient_accumulation_steps": 2, "label_smoothing_factor": 0.1, "bf16": True, "max_steps": 2}
    for model in (llama(1), Checkpointable(llama(1), mem_limit="1GB")):
        runs.append(trainer(model, tmp_path, data, **options))
        runs[-1].train()
    assert history(runs[1]) == history(runs[0])
    assert_same_weights(runs[1].model, runs[0].model)


@pytest.mark.slow
def test_a_saved_run_is_resumed_and_its_files_are_those_of_the_plain_model(tmp_path: Path) -> None:
    data = examples()
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
    whole = trainer(Checkpointable(llama(1), mem_limit="1GB"), tmp_path / "planned", data, **saving)
    whole.train()
    plain = trainer(llama(1), tmp_path / "plain", data, **saving)
    plain.train()
    kept = tmp_path / "planned" / "checkpoint-2"
    names = {file.name for file in (tmp_path / "plain" / "checkpoint-2").iterdir()}
    assert {file.name for file in kept.iterdir()} == names
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "planned" / "checkpoint-3")
    assert weights(again).keys() == weights(plain.model).keys()
    assert_same_weights(again, plain.model)
    for model in (Checkpointable(llama(1), mem_limit="1GB"), llama(1)):
        resumed = trainer(model, tmp_path / "resumed", data, **saving)
        resumed.train(resume_from_checkpoint=str(kept))
        assert_same_weights(resumed.model, plain.model)


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
