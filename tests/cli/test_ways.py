"""`--keep` and `--offload`: what may be kept in fewer bits or elsewhere, and what is said of it."""

import json
import re
import runpy

import pytest

from rotor_py import Checkpointable
from tests.fields import ends

pytestmark = pytest.mark.usefixtures("fast_link")
MODEL = """
import torch
from torch import nn

class Block(nn.Sequential):
    def forward(self, value):
        return super().forward(value)

model = nn.Sequential(*[Block(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Tanh()) for _ in range(5)])
sample = torch.randn(256, 64)

def loss(output):
    return output.square().mean()
"""


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


@pytest.mark.parametrize("batch", [[], ["--batch", "max"]])
@pytest.mark.parametrize(("tier", "kind"), [("host", "no_cuda"), ("file:/not/there", "no_file")])
def test_a_tier_that_is_not_there_is_refused(plan, model_file, batch, tier, kind):
    ends(plan(model_file(MODEL), "--mem-limit", "1GB", "--offload", tier, *batch), 2, kind, name="--offload")


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


def test_fewer_bits_need_less_are_told_of_where_needed_and_load_again(plan, report, model_file, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    file, path, saved = model_file(WIDE), tmp_path / "report.json", tmp_path / "plan.json"
    shown = plan(file, "--mem-limit", "1GB", "--keep", "int8", "--verify", "--json", path).stdout
    exact = json.loads(path.read_text())
    assert not {"fewer_bits", "gradient_error"} & {*exact["plan"], *exact["verify"]}
    assert exact["verify"]["max_grad_difference"] == 0
    assert "No stage is kept in int8: the plan is exact." in " ".join(shown.split())
    limit = (exact["min_bytes"] + 2 * exact["store_all"]["peak_bytes"]) // 3
    without = report(file, "--mem-limit", limit)
    assert "^" not in without["plan"]["sequence"]  # nothing inexact without the word
    options = ("--keep", "bf16", "--verify", "--json", path)
    result = plan(file, "--mem-limit", limit, *options)
    said = " ".join(result.stdout.split())
    assert result.exit_code == 0, result.output
    assert "kept in bf16 for the backward: the forward is exact, and gradients differ from those of plain" in said
    assert "stored in bf16" in said
    assert "with activations kept in bf16, gradients differ by " in said
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


def test_a_batch_is_chosen_with_fewer_bits_or_moves_and_an_unknown_word_gets_those_known(plan, model_file, tmp_path):
    text = WIDE.replace("sample = torch.randn(256, 32)", "def sample(batch): return torch.randn(batch, 32)")
    file = model_file(text.replace("time.sleep(0.004)", "time"))
    shown = plan(file, "--mem-limit", "4MB", "--batch", "max", "--keep", "bf16", "--offload", f"file:{tmp_path}").stdout
    assert 'keep="bf16"' in shown
    assert f'offload="file:{tmp_path}"' in "".join(shown.split()).replace("'", '"')
    assert "kept in bf16" in " ".join(shown.split())
    refused = plan(file, "--mem-limit", "4MB", "--keep", "fp4")
    assert (refused.exit_code, "'bf16', 'fp8', 'int8'" in refused.stderr) == (2, True)
