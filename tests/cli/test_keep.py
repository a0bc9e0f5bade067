"""`--keep`: what may be kept in fewer bits, and what is said of it."""

from __future__ import annotations

import json
import runpy

from rotor_py import Checkpointable

WIDE = """
import time

import torch
from torch import nn

class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 512), nn.Linear(512, 32)

    def forward(self, x):
        time.sleep(0.004)  # so to run it again costs more than to round, whatever else the machine does
        return x + self.down(self.up(x).tanh().square().sin())

model = nn.Sequential(Wide(), Wide())
sample = torch.randn(256, 32)

def loss(output):
    return output.square().mean()
"""


def test_fewer_bits_need_less_are_told_of_and_load_again(plan, report, model_file, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    file, path, saved = model_file(WIDE), tmp_path / "report.json", tmp_path / "plan.json"
    exact = report(file, "--mem-limit", "1GB")
    limit = (exact["min_bytes"] + 2 * exact["store_all"]["peak_bytes"]) // 3
    without = report(file, "--mem-limit", limit)
    assert "^" not in without["plan"]["sequence"]  # nothing inexact without the word
    options = ("--keep", "bf16", "--verify", "--json", path)
    result = plan(file, "--mem-limit", limit, *options)
    said = " ".join(result.stdout.split())
    assert result.exit_code == 0, result.output
    assert "kept in bf16 for the backward: the forward is exact, and gradients differ from those of plain" in said
    assert "stored in bf16" in said
    assert "with what is kept in bf16, gradients differ by " in said
    found = json.loads(path.read_text())
    assert set(found["plan"]["fewer_bits"].values()) == {"bf16"}
    assert 0 < found["verify"]["gradient_error"] < 0.01
    assert found["verify"]["measured_peak_bytes"] <= limit
    # The line that is printed loads the saved plan.
    file = model_file(WIDE + "def optimizer(parameters): return torch.optim.SGD(parameters, 0.1)")
    printed = plan(file, "--mem-limit", limit, "--keep", "bf16", "--step-in-backward", "--save", saved).stdout
    (line,) = (each for each in printed.splitlines() if "Checkpointable(model, plan=" in each)
    names = {**runpy.run_path(file), "Checkpointable": Checkpointable}
    names["optimizer"] = names["optimizer"](names["model"].parameters())
    exec(line.strip(), names)
    assert names["model"].sequence is not None


def test_a_plan_that_needs_no_fewer_bits_says_that_it_is_exact(plan, model_file, tmp_path):
    path = tmp_path / "report.json"
    result = plan(model_file(WIDE), "--mem-limit", "1GB", "--keep", "int8", "--verify", "--json", path)
    assert result.exit_code == 0, result.output
    report = json.loads(path.read_text())
    assert "fewer_bits" not in report["plan"]
    assert "gradient_error" not in report["verify"]
    assert report["verify"]["max_grad_difference"] == 0
    said = " ".join(result.stdout.split())
    assert "No stage is kept in int8: the plan is exact." in said


def test_a_batch_is_chosen_with_fewer_bits_among_the_ways(plan, model_file):
    text = WIDE.replace("sample = torch.randn(256, 32)", "def sample(batch): return torch.randn(batch, 32)")
    file = model_file(text.replace("time.sleep(0.004)", "time"))
    result = plan(file, "--mem-limit", "4MB", "--batch", "max", "--keep", "bf16")
    assert result.exit_code == 0, result.output
    assert 'keep="bf16"' in result.stdout
    assert "kept in bf16" in " ".join(result.stdout.split())


def test_another_word_than_those_of_keep_is_answered_with_these(plan, model_file):
    result = plan(model_file(WIDE), "--mem-limit", "1GB", "--keep", "fp4")
    assert result.exit_code == 2
    assert "'bf16', 'fp8', 'int8'" in result.stderr
