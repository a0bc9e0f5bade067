"""Classes of transformers by name, made from a configuration."""

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")

PICTURES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SMALL = {**PICTURES, "hidden_size": 32, "intermediate_size": 64, "vocab_size": 100}


@pytest.mark.filterwarnings("ignore")
def test_a_class_is_made_from_its_configuration_planned_verified_and_reported(report, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(SMALL))
    arguments = ["--config", str(config), "--input", "4,32:int64", "--mem-limit", "3MB", "--fresh-grads", "--verify"]
    found = report("transformers:LlamaForCausalLM", *arguments)
    assert found["verify"]["measured_peak_bytes"] <= 3_000_000
    assert "model.layers.0.self_attn" in [stage["name"] for stage in found["stages"]]


@pytest.mark.parametrize(
    ("model", "arguments", "words"),
    [
        ("LlamaForCausalLM", ["--config", "{a"], "--config is not JSON"),
        ("LlamaForCausalLM", ["--config", "[1]"], "neither JSON"),
        ("LlamaForCausalLM", ["--device", "nowhere"], "no device is called 'nowhere'"),
        ("LlamaForCasualLM", [], "transformers has no LlamaForCasualLM; did you mean LlamaForCausalLM"),
        ("ViTModel", ["--config", json.dumps(PICTURES)], "the input of ViTModel is 'pixel_values'; give its shape"),
        ("LlamaConfig", ["--config", "{}"], "--config needs a model class of transformers"),
    ],
)
def test_wrong_use_of_a_class_is_refused_in_one_sentence(plan, model: str, arguments: list[str], words: str) -> None:
    result = plan(f"transformers:{model}", "--mem-limit", "3MB", *arguments)
    assert result.exit_code == 2
    assert words in result.output
    assert "Traceback" not in result.output
