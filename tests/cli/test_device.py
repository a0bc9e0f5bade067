"""`--device h100`: a plan for a simulated device."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rotor_py.estimation.device_table import find_device
from tests.fields import invoke

HEAD = "import torch\nfrom torch import nn\n"
LABELS = f"""{HEAD}
labels = torch.zeros(64, dtype=torch.long)
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
rates = [each.item() for each in torch.linspace(0, 1, 3, device="cpu")]

def sample(batch=64):
    return torch.randn(batch, 256)

def loss(output):
    return nn.functional.cross_entropy(output, labels[: len(output)])

def optimizer(parameters):
    return torch.optim.AdamW(parameters)
"""
BLOCKS = f"""{HEAD}
model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(2)))
sample = torch.randn(4, 1024)
loss = torch.sum
"""
PARAMETERS = (256 * 1024 + 1024 + 1024 * 10 + 128) * 4  # the last bias takes a block of 512 bytes


class Planned(NamedTuple):
    json: dict[str, Any]
    text: str
    page: str


@functools.cache
def run(*options: str, model: str = LABELS) -> Planned:
    """One run for all that is shown of it; text and page in one line each."""
    with tempfile.TemporaryDirectory() as folder:
        file, page, saved = (Path(folder, name) for name in ("net.py", "page.html", "report.json"))
        file.write_text(model)
        result = invoke(file, *options, "--html", page, "--json", saved)
        assert result.exit_code == 0, result.output
        shown = (each.replace("\N{NO-BREAK SPACE}", " ").split() for each in (result.stdout, page.read_text()))
        return Planned(json.loads(saved.read_text()), *map(" ".join, shown))


def test_what_is_exact_predicted_and_assumed_are_kept_apart() -> None:
    found = run("--device", "h100").json
    basis = found["prediction"]
    assert found["device"] == basis["device"] == find_device("h100").name
    assert basis["exact"] == {
        "parameters_bytes": PARAMETERS,
        "buffers_bytes": 0,
        "gradients_bytes": PARAMETERS,
        "optimizer_bytes": 2 * PARAMETERS,
        "batch_bytes": 64 * 256 * 4,
        "activation_bytes": sum(each["activation_bytes"] for each in found["stages"]),
        "saved_bytes": sum(each["saved_bytes"] for each in found["stages"]),
        "inexact_layers": [],
    }
    assert basis["predicted"]["peak_bytes"] == found["plan"]["peak_bytes"]
    assert basis["predicted"]["min_bytes"] == found["min_bytes"]
    assert basis["predicted"]["step_peak_bytes"] == pytest.approx(found["plan"]["peak_bytes"], rel=0.001)
    assert basis["predicted"]["reserved_bytes"] >= found["plan"]["peak_bytes"] - 512
    assert basis["predicted"]["reserved_expandable_bytes"] > 0
    assumed = basis["assumed"]
    least, most = assumed["step_seconds"]
    assert least < found["plan"]["step_seconds"] < most
    assert assumed["efficiencies"]["anchor"] == find_device("h100").efficiencies.anchor
    assert found["plan"]["step_seconds_range"] == [least, most]
    plain = found["store_all"]
    assert plain["step_seconds_range"][0] < plain["step_seconds"] < plain["step_seconds_range"][1]
    assert assumed["link_bytes_per_second"] == find_device("h100").link_bandwidth
    assert basis["measured"] == {}
    found = run("--device", "cpu", "--mem-limit", "1GB", "--dtype", "bf16", "--optimizer", "sgd", "--fresh-grads").json
    assert not {"prediction", "step_seconds_range"} & {*found, *found["plan"], *found["store_all"]}
    parameters = (256 * 1024 + 1024 + 1024 * 10 + 10) * 2
    assert parameters <= found["fixed_bytes"] < 1.2 * parameters


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h200", ["efficiencies no anchor: taken from the H100, which has the same chip"]),
        ("l4", ["efficiencies no anchor"]),
        ("h100", ["fitted to 37 steps of MPT models"]),
        ("mi300x", ["kernels of ROCm (AOTriton, MIOpen) save and need as many bytes as CUDA's", "for hipBLAS"]),
    ],
)
def test_text_and_page_say_what_is_exact_predicted_and_assumed(name: str, words: list[str]) -> None:
    found, text, page = run("--device", name, *OPTIONS.get(name, ()))
    (least, most), anchored = found["prediction"]["assumed"]["step_seconds"], find_device(name).efficiencies.anchor
    assert (most / least > 2) == (anchored is None), "without an anchor, seconds are known less well"
    assert f"on {find_device(name).name}" in text
    assert f"for {find_device(name).name}, predicted." in page
    for shown in (text, page):
        assert all(each in shown for each in ("Exact:", "Predicted:", "Assumed:", "reserved (predicted)"))
        assert ("fitted to" in shown) == (name == "h100")
    for each in (*words, "Nothing was measured. Exact:", "attention by the kernel that torch"):
        assert each in text
    assert ("cuBLAS" in text) == (name != "mi300x")
    assert name != "l4" or text.index("overhead") < text.index("planned", text.index("time"))


RECURRENT = f"""{HEAD}
model, sample = nn.Sequential(nn.Linear(16, 32), nn.LSTM(32, 64)), torch.randn(8, 5, 16)
def loss(made): return made[0].sum()
"""


def test_bytes_alone_are_a_device_whose_rates_stand_in_is_said_and_recurrent_layers_are_warned_of_by_name() -> None:
    stand_in, (found, *texts) = "NVIDIA A100 SXM 80 GB", run("--device-memory", "24GB", model=RECURRENT)
    for shown in texts:
        assert f"the rates, the bandwidths and the kernels of {stand_in}, since only the memory" in shown
        assert "Warning: for the recurrent layers (1), no number is exact: they were planned with" in shown
    assert found["prediction"]["exact"]["inexact_layers"] == ["1"]
    assert found["prediction"]["assumed"]["rates_of"] == stand_in
    assert found["device"] == "a device of 24.0 GB"
    assert found["prediction"]["assumed"]["efficiencies"]["anchor"] is None
    assert found["mem_limit"] < 0.9 * 24e9


def test_a_file_has_a_device_of_ones_own_of_which_there_may_be_several_and_autocast_is_planned(tmp_path: Path) -> None:
    file, saved = tmp_path / "mine.toml", tmp_path / "plan.json"
    cells = {"bandwidth": 1e12, "bf16": 1e14, "fp16": 1e14, "tf32": 5e13, "fp32": 2e13, "link": 3e10, "pcie": 3e10}
    lines = [f"{key} = {value}" for key, value in cells.items()]
    file.write_text("\n".join(["[mine]", 'memory = "10GB"', 'compute_capability = "8.9"', *lines]))
    options = ("--device-file", str(file))
    cast = run(*options, "--autocast", "bf16", "--batch", "4096", "--save", str(saved), model=BLOCKS).json
    assert cast["device"] == "mine"
    # In 32 bits, of each block the output is kept, and what GELU reads.
    assert cast["prediction"]["exact"]["saved_bytes"] < 2 * 2 * 4096 * 1024 * 4
    assert json.loads(saved.read_text())["input"]["autocast"] == "bfloat16"
    several = run(*options, "--device", "Mine:8", "--shard", "whole", model=BLOCKS).json
    assert (several["device"], several["prediction"]["devices"]) == ("8 × mine", 8)
    parameters = 2 * (1024 * 1024 + 1024) * 4
    assert several["prediction"]["predicted"]["communication_bytes"] >= parameters, "all are gathered at once"


OPTIONS = {"h200": ("--dtype", "bfloat16", "--optimizer", "sgd-momentum")}
"""Of the runs on some devices."""


def test_numbers_and_optimizer_can_be_chosen_on_the_command_line() -> None:
    found = run("--device", "h200", *OPTIONS["h200"]).json["prediction"]["exact"]
    assert found["batch_bytes"] == 64 * 256 * 2
    assert found["parameters_bytes"] == pytest.approx(PARAMETERS / 2, abs=1024)
    assert found["optimizer_bytes"] == found["parameters_bytes"]


def test_several_devices_are_planned_for_and_said(tmp_path: Path) -> None:
    saved, name = tmp_path / "plan.json", "8 × NVIDIA H100 SXM 80 GB"
    found, *texts = run("--device", "h100:8", "--precision", "bfloat16", "--save", str(saved))
    one = run("--device", "h100").json
    assert found["device"] == json.loads(saved.read_text())["predicted_for"] == name
    assert found["prediction"]["devices"] == 8
    assert found["prediction"]["predicted"]["communication_bytes"] > 0
    assert found["prediction"]["exact"]["parameters_bytes"] < one["prediction"]["exact"]["parameters_bytes"]
    assert found["stages"][0]["activation_bytes"] == 64 * 1024 * 2, "layers run in bfloat16"
    for text in texts:
        assert name in text
        assert "gathered parameters, and gradients that are sent." in text
        assert "batches without padding; devices send to each other while they compute." in text
        assert " measured " not in text
