"""`rotor-plan --offload`: what is said of plans that move activations, and what excludes them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from rotor_py.estimation.device_table import find_device
from tests.fields import ends

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh())
    def forward(self, value):
        return self.layers(value)

model = nn.Sequential(*[Block() for _ in range(5)])
sample = torch.randn(256, 64)

def loss(output):
    return output.square().mean()
"""


@pytest.fixture(autouse=True)
def fast_link(monkeypatch):
    monkeypatch.setattr("rotor_py.offload.offload.measure_bandwidth", lambda *_: 1e13)


def test_a_plan_that_moves_is_shown_verified_and_loaded(plan, report, model_file, tmp_path):
    file, folder = model_file(MODEL), tmp_path / "away"
    folder.mkdir()
    loose = report(file, "--mem-limit", "1GB", "--fresh-grads")
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
    assert f'"file:{folder}"' in (tmp_path / "plan.json").read_text()
    assert list(folder.iterdir()) == []


def test_a_time_is_planned_for_with_moves_at_a_lower_limit(report, model_file, tmp_path):
    options = (model_file(MODEL), "--max-overhead", "5%", "--fresh-grads")
    alone = report(*options)
    facts = report(*options, "--offload", f"file:{tmp_path}", "--verify", "--sweep")
    assert facts["mem_limit"] == facts["plan"]["peak_bytes"] < alone["mem_limit"]
    assert facts["plan"]["overhead"] <= 1.05
    assert facts["plan"]["moved_bytes"] > 0
    assert facts["verify"]["max_grad_difference"] == 0
    assert 0.98 * facts["plan"]["peak_bytes"] <= facts["verify"]["measured_peak_bytes"] <= facts["mem_limit"]
    assert facts["mem_limit"] in [point["mem_limit"] for point in facts["sweep"]["points"]]


def test_a_batch_is_chosen_among_plans_that_move(report, model_file, tmp_path):
    file = model_file(
        MODEL.replace("sample = torch.randn(256, 64)", "def sample(batch): return torch.randn(batch, 64)")
    )
    least = report(file, "--mem-limit", "1GB", "--batch", 256, "--fresh-grads")
    options = (file, "--mem-limit", least["min_bytes"] + 1000, "--fresh-grads", "--batch")
    alone = report(*options, "max")
    moving = report(*options, "max", "--offload", f"file:{tmp_path}")
    assert moving["batch"]["batch"] == alone["batch"]["batch"] >= 256
    assert moving["plan"]["moved_bytes"] > 0
    assert moving["plan"]["overhead"] < alone["plan"]["overhead"]
    assert 0 < moving["batch"]["measured_peak_bytes"] <= moving["mem_limit"]


def test_moves_to_the_host_are_planned_for_a_device_that_is_not_here(report, model_file, monkeypatch):
    h100 = find_device("h100")
    monkeypatch.setattr("rotor_py.estimation.device_table._table", lambda: {"h100": replace(h100, pcie_bandwidth=1e14)})
    file = model_file(MODEL.replace("torch.randn(256, 64)", "torch.randn(65536, 64)"))
    options = (file, "--device", "h100", "--fresh-grads", "--mem-limit")
    loose = report(*options, "10GB")
    limit = (loose["min_bytes"] + loose["store_all"]["peak_bytes"]) // 2
    found = report(*options, limit, "--offload", "host")["plan"]
    assert found["moved_bytes"] > 0
    assert found["peak_bytes"] <= limit


@pytest.mark.parametrize("batch", [[], ["--batch", "max"]])
@pytest.mark.parametrize(("tier", "kind"), [("host", "no_cuda"), ("file:/not/there", "no_file")])
def test_a_tier_that_is_not_there_is_refused(plan, model_file, batch, tier, kind):
    ends(plan(model_file(MODEL), "--mem-limit", "1GB", "--offload", tier, *batch), 2, kind, name="--offload")
