"""`--device h100`: a plan for a device that need not be here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rotor_py.estimation.device_table import find_device
from tests.fields import ends

LABELS = """
import torch
from torch import nn

labels = {"of": torch.zeros(64, dtype=torch.long)}
model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 10))
rates = [each.item() for each in torch.linspace(0, 1, 3, device="cpu")]

def sample(batch=64):
    return torch.randn(batch, 256)

def loss(output):
    return nn.functional.cross_entropy(output, labels["of"][: len(output)])

def optimizer(parameters):
    return torch.optim.AdamW(parameters)
"""
BLOCKS = """
import torch
from torch import nn

model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(3)))
sample = torch.randn(4, 1024)
loss = torch.sum
"""
PARAMETERS = (256 * 1024 + 1024 + 1024 * 10 + 128) * 4  # the last bias takes a block of 512 bytes


@pytest.fixture
def planned(report, model_file):
    """The report of `LABELS`, or another model."""

    def run(*options: object, model: str = LABELS) -> dict:
        return report(model_file(model), *options)

    return run


@pytest.fixture
def text_and_page(plan, model_file, tmp_path):
    """What the terminal and the page show, in one line each."""

    def run(*options: object, model: str = LABELS) -> tuple[str, str]:
        page = tmp_path / "page.html"
        result = plan(model_file(model), *options, "--html", page)
        assert result.exit_code == 0, result.output
        first, second = (
            " ".join(each.replace("\N{NO-BREAK SPACE}", " ").split()) for each in (result.stdout, page.read_text())
        )
        return first, second

    return run


def test_what_is_exact_predicted_and_assumed_are_kept_apart(planned) -> None:
    found = planned("--device", "h100")
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
    assert assumed["rates_of"] == find_device("h100").name
    assert found["plan"]["step_seconds_range"] == [least, most]
    plain = found["store_all"]
    assert plain["step_seconds_range"][0] < plain["step_seconds"] < plain["step_seconds_range"][1]
    assert assumed["attention_kernel"].endswith("chooses for compute capability 9.0")
    assert assumed["padding"] is assumed["communication_overlaps"] is False
    assert assumed["link_bytes_per_second"] == find_device("h100").link_bandwidth
    assert assumed["workspace_bytes"] == 64 * 2**20
    assert basis["measured"] == {}


def test_what_is_measured_rests_on_no_prediction(planned) -> None:
    found = planned("--device", "cpu", "--mem-limit", "1GB")
    assert "prediction" not in found
    assert "step_seconds_range" not in {**found["plan"], **found["store_all"]}


def test_without_an_anchor_seconds_are_known_less_well(planned) -> None:
    def width(name: str) -> float:
        least, most = planned("--device", name)["prediction"]["assumed"]["step_seconds"]
        return most / least

    assert find_device("l4").efficiencies.anchor is None
    anchored = width("h100")
    for name in ("l4", "h200", "a100-40"):
        assert width(name) > anchored, name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h200", ["efficiencies no anchor: taken from the H100, which has the same chip"]),
        ("a100-40", ["efficiencies no anchor: taken from the A100 of 80 GB; 46 published steps"]),
        ("l4", ["efficiencies no anchor"]),
        ("h100", ["fitted to 37 steps of MPT models"]),
        ("mi300x", ["kernels of ROCm (AOTriton, MIOpen) keep and take as much as CUDA's", "for hipBLAS"]),
    ],
)
def test_text_and_page_say_what_is_exact_predicted_and_assumed(text_and_page, name: str, words: list[str]) -> None:
    text, page = text_and_page("--device", name)
    assert f"on {find_device(name).name}" in text
    assert f"for {find_device(name).name}, predicted." in page
    for shown in (text, page):
        for each in ("Exact:", "Predicted:", "Assumed:", "reserved (predicted)"):
            assert each in shown
        assert ("fitted to" in shown) == (name == "h100")
    for each in words:
        assert each in text
    assert "Nothing was measured. Exact:" in text
    assert "attention by the kernel that torch" in text
    assert ("cuBLAS" in text) == (name != "mi300x")
    assert name != "l4" or text.index("overhead") < text.index("planned", text.index("time"))


def test_bytes_alone_are_a_device_and_whose_rates_stand_in_is_said(planned, text_and_page) -> None:
    stand_in, found = "NVIDIA A100 SXM 80 GB", planned("--device-memory", "24GB")
    for shown in text_and_page("--device-memory", "24GB"):
        assert f"the rates, the bandwidths and the kernels of {stand_in}, since only the memory" in shown
    assert found["prediction"]["assumed"]["rates_of"] == stand_in
    assert found["device"] == "a device of 24.0 GB"
    assert found["prediction"]["assumed"]["efficiencies"]["anchor"] is None
    assert found["mem_limit"] < 0.9 * 24e9


@pytest.fixture
def own_device(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    cells = {"bandwidth": 1e12, "bf16": 1e14, "fp16": 1e14, "tf32": 5e13, "fp32": 2e13, "link": 3e10, "pcie": 3e10}
    lines = [f"{key} = {value}" for key, value in cells.items()]
    file.write_text("\n".join(["[mine]", 'memory = "10GB"', 'compute_capability = "8.9"', *lines]))
    return file


def test_a_file_has_a_device_of_ones_own_of_which_there_may_be_several(planned, own_device: Path) -> None:
    file = ("--device-file", own_device)
    assert planned(*file)["device"] == planned(*file, "--device", "Mine")["device"] == "mine"
    blocks, whole = (planned(*file, "--device", "mine:8", "--shard", how, model=BLOCKS) for how in ("blocks", "whole"))
    assert (blocks["device"], blocks["prediction"]["devices"]) == ("8 × mine", 8)
    assert whole["plan"]["peak_bytes"] > blocks["plan"]["peak_bytes"]


def test_numbers_and_optimizer_can_be_chosen_on_the_command_line(planned) -> None:
    found = planned("--device", "a100-80", "--dtype", "bfloat16", "--optimizer", "sgd-momentum")["prediction"]["exact"]
    assert found["batch_bytes"] == 64 * 256 * 2
    assert found["parameters_bytes"] == pytest.approx(PARAMETERS / 2, abs=1024)
    assert found["optimizer_bytes"] == found["parameters_bytes"]


def test_they_can_be_chosen_for_a_device_that_is_here_as_well(planned) -> None:
    found = planned("--mem-limit", "1GB", "--device", "cpu", "--dtype", "bf16", "--optimizer", "sgd", "--fresh-grads")
    parameters = (256 * 1024 + 1024 + 1024 * 10 + 10) * 2
    assert parameters <= found["fixed_bytes"] < 1.2 * parameters


def test_several_devices_are_planned_for_and_said(planned, text_and_page, tmp_path: Path) -> None:
    saved, options, name = tmp_path / "plan.json", ("--device", "h100:8"), "8 × NVIDIA H100 SXM 80 GB"
    found, one = planned(*options, "--precision", "bfloat16", "--save", saved), planned("--device", "h100")
    assert found["device"] == json.loads(saved.read_text())["predicted_for"] == name
    assert found["prediction"]["devices"] == 8
    assert found["prediction"]["predicted"]["communication_bytes"] > 0
    assert found["prediction"]["exact"]["parameters_bytes"] < one["prediction"]["exact"]["parameters_bytes"]
    for text in text_and_page(*options, model=BLOCKS):
        for words in (
            name,
            "Nothing was measured. Exact: parameters",
            "Predicted: peaks, what the allocator reserves,",
            "parameters that are whole, and gradients on their way.",
            "Assumed: the parts of the data sheet",
            "batches without padding; what devices send to each other is sent while they compute.",
        ):
            assert words in text, words
        assert " measured " not in text


RECURRENT = """
import torch
from torch import nn

class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(32, 64, batch_first=True)

    def forward(self, value):
        return self.lstm(value)[0]

model = nn.Sequential(nn.Linear(16, 32), Last(), nn.Linear(64, 4))
sample = torch.randn(8, 5, 16)
loss = torch.sum
"""


def test_recurrent_layers_are_warned_of_by_name(planned, text_and_page) -> None:
    for text in text_and_page("--device", "h100", model=RECURRENT):
        assert "Warning: that is not so of the recurrent layers (1.lstm): they were planned with operators of" in text
    found = planned("--device", "mi300x", model=RECURRENT)
    assert found["prediction"]["exact"]["inexact_layers"] == ["1.lstm"]


READS = """
import torch
from torch import nn

class Reads(nn.Linear):
    def forward(self, value):
        made = super().forward(value)
        return made * 2 if made.sum().item() > 0 else made

model = nn.Sequential(nn.Linear(4, 4), Reads(4, 4))
sample = torch.randn(2, 4)
"""


def test_a_model_that_reads_values_is_refused(plan, model_file) -> None:
    result = plan(model_file(READS), "--device", "h100")
    ends(result, 2, "depends_on_values")


def test_a_limit_that_is_too_small_says_the_least_one(plan, model_file) -> None:
    result = plan(model_file(LABELS), "--device", "h100", "--mem-limit", "20MB")
    ends(result, 3, "limit_too_small")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_class_of_transformers_needs_no_memory(plan) -> None:
    pytest.importorskip("transformers")
    config = json.dumps({"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                         "num_attention_heads": 2, "num_key_value_heads": 1})  # fmt: skip
    result = plan("transformers:LlamaForCausalLM", "--config", config, "--input", "2,64:int64", "--dtype", "bfloat16",
                  "--optimizer", "adamw-fused", "--device", "h100", "--json", "-")  # fmt: skip
    found = json.loads(result.stdout)["prediction"]["exact"]
    # Two moments for each parameter, and a count of steps on the device.
    assert found["optimizer_bytes"] > 2 * found["parameters_bytes"]


ODD = """
import torch
from torch import nn

widths = [256, 704, 448, 832, 320, 960, 576, 256, 896, 384, 640, 1024, 512]
model = nn.Sequential(*(nn.Sequential(nn.Linear(*pair), nn.ReLU(), nn.Tanh()) for pair in zip(widths, widths[1:])))

def sample(batch=16384):
    return torch.randn(batch, 256)
"""


@pytest.mark.slow
def test_a_default_limit_leaves_room_for_what_is_reserved_and_a_given_one_is_kept(plan, model_file) -> None:
    file, memory = model_file(ODD), 520 * 2**20 + 700 * 2**20
    default = json.loads(plan(file, "--device-memory", str(memory), "--json", "-").stdout)
    assert default["plan"]["peak_bytes"] <= default["mem_limit"] < 0.89 * 700 * 2**20
    assert default["prediction"]["predicted"]["reserved_bytes"] <= 700 * 2**20
    given = plan(file, "--device-memory", str(memory), "--mem-limit", "90%")
    assert "fits in 661 MB" in given.stdout
    assert "predicted to run out of memory although its tensors fit" in " ".join(given.stdout.split())


@pytest.mark.slow
def test_how_large_a_batch_is_predicted(plan, model_file, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    given = ("--device", "l4", "--mem-limit", "20.5MB", "--batch")
    result = plan(model_file(), *given, "max", "--html", page)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    for words in ("is the largest inside 20.5 MB", "samples a second predicted", "No step was taken, and no batch was"):
        assert words in text
    assert "</i>measured<" not in page.read_text()
    found = json.loads(plan(model_file(), *given, "best", "--json", "-").stdout)
    assert found["prediction"]["measured"] == {}
    assert found["batch"]["measured_peak_bytes"] is None
    assert not any(point["measured"] for point in found["batch"]["points"])


def test_a_step_under_autocast_keeps_less_and_its_plan_says_so(plan, model_file, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    kept = []
    for options in ([], ["--autocast", "bf16", "--save", saved]):
        result = plan(model_file(), "--device", "h100", "--batch", 65536, *options, "--json", "-")
        assert result.exit_code == 0, result.output
        kept.append(sum(stage["saved_bytes"] for stage in json.loads(result.stdout)["stages"]))
    assert kept[1] < kept[0]
    assert json.loads(saved.read_text())["input"]["autocast"] == "bfloat16"
