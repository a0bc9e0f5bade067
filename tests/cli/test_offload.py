"""`rotor-plan --offload`: what is said of plans that move activations, and what excludes them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from rotor_py.estimation.device_table import find_device
from rotor_py.offload.offload import Bandwidth
from tests.fields import ends

MODEL = """
import torch
from torch import nn

class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh())

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.block = Block()
    def forward(self, value):
        return self.block(value)

model = nn.Sequential(*[Inner() for _ in range(5)])
sample = torch.randn(256, 64)

def loss(output):
    return output.square().mean()
"""


@pytest.fixture(autouse=True)
def fast_link(monkeypatch):
    monkeypatch.setattr("rotor_py.offload.offload.measure_bandwidth", lambda *_: Bandwidth(1e13, 1e13))


def test_a_plan_that_moves_is_shown_verified_and_loaded(plan, model_file, tmp_path):
    file, folder = model_file(MODEL), tmp_path / "away"
    folder.mkdir()
    loose = json.loads(plan(file, "--mem-limit", "1GB", "--fresh-grads", "--json", "-").stdout)
    limit = (loose["min_bytes"] + loose["store_all"]["peak_bytes"]) // 2
    options = ("--mem-limit", limit, "--fresh-grads", "--offload", f"file:{folder}")
    result = plan(file, *options, "--verify", "--save", tmp_path / "plan.json", "--json", tmp_path / "facts.json")
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert "of activations are moved to" in text
    assert re.search(r"stored ([a-z, ]+, )?elsewhere: [0-9.]+ [kM]B moved", text)  # also in part, or packed
    assert f"offload='file:{folder}'" in "".join(result.stdout.split())
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["plan"]["moved_bytes"] > 0
    assert facts["verify"]["max_grad_difference"] == 0
    assert 0.98 * facts["plan"]["peak_bytes"] <= facts["verify"]["measured_peak_bytes"] <= limit
    assert json.loads((tmp_path / "plan.json").read_text())["moves"]["to"] == f"file:{folder}"
    assert list(folder.iterdir()) == []


def test_a_time_is_planned_for_with_moves_at_a_lower_limit(plan, model_file, tmp_path):
    file, folder = model_file(MODEL), tmp_path / "away"
    folder.mkdir()
    alone = json.loads(plan(file, "--max-overhead", "5%", "--fresh-grads", "--json", "-").stdout)
    options = ("--max-overhead", "5%", "--fresh-grads", "--offload", f"file:{folder}", "--verify", "--sweep")
    result = plan(file, *options, "--save", tmp_path / "plan.json", "--json", tmp_path / "facts.json")
    assert result.exit_code == 0, result.output
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["mem_limit"] == facts["plan"]["peak_bytes"] < alone["mem_limit"]
    assert facts["plan"]["overhead"] <= 1.05
    assert facts["plan"]["moved_bytes"] > 0
    assert facts["verify"]["max_grad_difference"] == 0
    assert 0.98 * facts["plan"]["peak_bytes"] <= facts["verify"]["measured_peak_bytes"] <= facts["mem_limit"]
    assert facts["mem_limit"] in [point["mem_limit"] for point in facts["sweep"]["points"]]
    assert list(folder.iterdir()) == []


def test_the_best_batch_is_chosen_by_steps_that_move(plan, model_file, tmp_path):
    sized = "def sample(batch): return torch.randn(batch, 64)"
    file, folder = model_file(MODEL.replace("sample = torch.randn(256, 64)", sized)), tmp_path / "away"
    folder.mkdir()
    least = json.loads(plan(file, "--mem-limit", "1GB", "--batch", 64, "--fresh-grads", "--json", "-").stdout)
    limit = least["min_bytes"] + 1000
    options = ("--mem-limit", limit, "--fresh-grads", "--batch", "best", "--offload", f"file:{folder}", "--json", "-")
    result = plan(file, *options)
    assert result.exit_code == 0, result.output
    chosen = json.loads(result.stdout)
    assert "moved_bytes" in chosen["plan"]  # whether any move is up to clocks: a batch with room for all may be faster
    assert 0 < chosen["batch"]["measured_peak_bytes"] <= chosen["mem_limit"] == limit
    assert list(folder.iterdir()) == []


def test_a_batch_is_chosen_among_plans_that_move(plan, model_file, tmp_path):
    file = model_file(
        MODEL.replace("sample = torch.randn(256, 64)", "def sample(batch): return torch.randn(batch, 64)")
    )
    least = json.loads(plan(file, "--mem-limit", "1GB", "--batch", 256, "--fresh-grads", "--json", "-").stdout)
    options = ("--mem-limit", least["min_bytes"] + 1000, "--fresh-grads", "--batch", "max", "--json", "-")
    alone = json.loads(plan(file, *options).stdout)
    result = plan(file, *options, "--offload", f"file:{tmp_path}")
    assert result.exit_code == 0, result.output
    moving = json.loads(result.stdout)
    assert moving["batch"]["batch"] == alone["batch"]["batch"] >= 256
    assert moving["plan"]["moved_bytes"] > 0
    assert moving["plan"]["overhead"] < alone["plan"]["overhead"]
    assert moving["batch"]["measured_peak_bytes"] <= moving["mem_limit"]


def test_moves_to_the_host_are_planned_for_a_device_that_is_not_here(plan, model_file, monkeypatch):
    h100 = find_device("h100")
    monkeypatch.setattr("rotor_py.estimation.device_table._table", lambda: {"h100": replace(h100, pcie_bandwidth=1e14)})
    file = model_file(MODEL.replace("torch.randn(256, 64)", "torch.randn(65536, 64)"))
    options = ("--device", "h100", "--fresh-grads", "--json", "-")
    loose = json.loads(plan(file, "--mem-limit", "10GB", *options).stdout)
    limit = (loose["min_bytes"] + loose["store_all"]["peak_bytes"]) // 2
    result = plan(file, "--mem-limit", limit, "--offload", "host", *options)
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["plan"]["moved_bytes"] > 0
    assert facts["plan"]["peak_bytes"] <= limit


@pytest.mark.parametrize(
    ("options", "kind", "name"),
    [
        (["--offload", "tape"], "unknown_value", "--offload"),
        (["--offload", "host"], "no_cuda", "--offload"),
        (["--offload", "file:/not/there"], "no_file", "--offload"),
        (["--offload", "file:/tmp", "--forwards-in-flight", 2], "excluded_together", "--forwards-in-flight"),
        (["--offload", "file:/tmp", "--compile"], "excluded_together", "--compile"),
        (["--offload", "file:/not/there", "--batch", "max"], "no_file", "--offload"),
        (["--offload", "file:/tmp", "--pipeline", 2], "excluded_together", "--offload"),
        (["--offload", "file:/tmp", "--device", "h100"], "excluded_together", "--offload"),
        (
            ["--offload", "host", "--device", "h100", "--batch", "max"],
            "excluded_together",
            "--batch max",
        ),
    ],
)
def test_what_cannot_be_moved_is_refused_in_a_sentence(plan, model_file, options, kind, name):
    result = plan(model_file(MODEL), "--mem-limit", "1GB", *options)
    ends(result, 2, kind, name=name)
