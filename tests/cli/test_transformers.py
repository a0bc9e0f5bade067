"""Classes of transformers by name, made from a configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rotor_cli.main import main

pytest.importorskip("transformers")

SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(arguments))
    return result.exit_code, result.output


@pytest.mark.filterwarnings("ignore")
def test_a_class_is_made_from_its_configuration_planned_verified_and_reported(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL))
    report = tmp_path / "report.json"
    arguments = ["--config", str(config), "--input", "4,32:int64", "--mem-limit", "3MB", "--fresh-grads", "--verify"]
    code, output = plan("transformers:LlamaForCausalLM", *arguments, "--json", str(report))
    assert code == 0, output
    found = json.loads(report.read_text())
    assert found["verify"]["measured_peak_bytes"] <= 3_000_000
    assert "model.layers.1.mlp" in [stage["name"] for stage in found["stages"]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", "{a"], "--config is not JSON"),
        (["--config", "[1]"], "neither JSON"),
        (["--config", "nothing.json"], "neither JSON"),
        (["--config", json.dumps(SMALL), "--input", "4,32", "--device", "nowhere"], "no device is called 'nowhere'"),
    ],
)
def test_a_bad_configuration_is_refused_in_one_sentence(arguments: list[str], words: str) -> None:
    code, output = plan("transformers:LlamaForCausalLM", "--mem-limit", "3MB", *arguments)
    assert code == 2
    assert words in output
    assert "Traceback" not in output


def test_a_wrong_class_name_is_answered_with_the_nearest() -> None:
    code, output = plan("transformers:LlamaForCasualLM", "--mem-limit", "3MB")
    assert code == 2
    assert "transformers has no LlamaForCasualLM; did you mean LlamaForCausalLM" in output


def test_the_shape_of_pictures_is_asked_for() -> None:
    config = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    code, output = plan("transformers:ViTModel", "--config", json.dumps(config), "--mem-limit", "3MB")
    assert code == 2
    assert "the input of ViTModel is 'pixel_values'; say its shape" in output


def test_a_configuration_for_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "plain.py"
    file.write_text("import torch\nmodel = torch.nn.Sequential(torch.nn.Linear(2, 2))\nsample = torch.ones(1, 2)\n")
    code, output = plan(str(file), "--config", "{}", "--mem-limit", "3MB")
    assert code == 2
    assert "--config is for a class of models of transformers" in output
