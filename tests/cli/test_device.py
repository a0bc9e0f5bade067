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
def report(plan, model_file):
    def run(*options: str) -> dict:
        return json.loads(plan(model_file(LABELS), "--json", "-", *options).stdout)

    return run


def test_what_is_exact_predicted_and_assumed_are_kept_apart(report) -> None:
    found = report("--device", "h100")
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


def test_what_is_measured_rests_on_no_prediction(report) -> None:
    found = report("--device", "cpu", "--mem-limit", "1GB")
    assert "prediction" not in found
    assert "step_seconds_range" not in {**found["plan"], **found["store_all"]}


def test_without_an_anchor_seconds_are_known_less_well(report) -> None:
    def width(name: str) -> float:
        least, most = report("--device", name)["prediction"]["assumed"]["step_seconds"]
        return most / least

    assert find_device("l4").efficiencies.anchor is None
    anchored = width("h100")
    for name in ("l4", "h200", "a100-40"):
        assert width(name) > anchored, name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h200", "efficiencies no anchor: taken from the H100, which has the same chip"),
        ("a100-40", "efficiencies no anchor: taken from the A100 of 80 GB; 46 published steps"),
        ("l4", "efficiencies no anchor"),
        ("h100", "fitted to 37 steps of MPT models"),
    ],
)
def test_whose_efficiencies_were_taken_is_said(plan, model_file, name: str, words: str) -> None:
    text = " ".join(plan(model_file(LABELS), "--device", name).stdout.replace("\N{NO-BREAK SPACE}", " ").split())
    assert words in text
    assert "fitted to taken from" not in text
    assert ("fitted to" in text) == (name == "h100")


def test_the_text_says_the_words_and_overhead_comes_first(plan, model_file) -> None:
    text = " ".join(plan(model_file(LABELS), "--device", "l4").stdout.replace("\N{NO-BREAK SPACE}", " ").split())
    for words in (
        "on NVIDIA L4",
        "Nothing was measured. Exact:",
        "Predicted: peaks",
        "Assumed:",
        "no anchor",
        " to ",
        "reserved (predicted)",
    ):
        assert words in text
    assert text.index("overhead") < text.index("planned", text.index("time"))
    assert "attention by the kernel that torch" in text


def test_the_page_says_them_too(plan, model_file, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    plan(model_file(LABELS), "--device", "h100", "--html", str(page))
    text = page.read_text()
    for words in (
        "Exact:",
        "Predicted:",
        "Assumed:",
        "fitted to",
        "reserved (predicted)",
        f"for {find_device('h100').name}, predicted.",
    ):
        assert words in text


def test_bytes_alone_are_a_device_and_whose_rates_stand_in_is_said(plan, model_file, tmp_path: Path) -> None:
    file, page = tmp_path / "report.json", tmp_path / "page.html"
    options = ("--device-memory", "24GB", "--json", file, "--html", page)
    text = " ".join(plan(model_file(LABELS), *options).stdout.split())
    found, stand_in = json.loads(file.read_text()), "NVIDIA A100 SXM 80 GB"
    for shown in (text, page.read_text()):
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


def test_a_file_has_a_device_of_ones_own(report, own_device: Path) -> None:
    assert report("--device-file", own_device)["device"] == "mine"
    assert report("--device-file", own_device, "--device", "Mine")["device"] == "mine"


def test_of_a_device_of_ones_own_there_may_be_several(plan, model_file, own_device: Path) -> None:
    options = ("--device-file", own_device, "--device", "mine:8", "--json", "-")

    def found(*more: str) -> dict:
        return json.loads(plan(model_file(BLOCKS), *options, *more).stdout)

    by_blocks = found()
    assert by_blocks["device"] == "8 × mine"
    assert by_blocks["prediction"]["devices"] == 8
    assert found("--shard", "whole")["plan"]["peak_bytes"] > by_blocks["plan"]["peak_bytes"]
    refused = plan(model_file(BLOCKS), "--device-file", own_device, "--device", "mine:none")
    ends(refused, 2, "not_a_count", name="--device")


def test_numbers_and_optimizer_can_be_chosen_on_the_command_line(report) -> None:
    found = report("--device", "a100-80", "--dtype", "bfloat16", "--optimizer", "sgd-momentum")["prediction"]["exact"]
    assert found["batch_bytes"] == 64 * 256 * 2
    assert found["parameters_bytes"] == pytest.approx(PARAMETERS / 2, abs=1024)
    assert found["optimizer_bytes"] == found["parameters_bytes"]


def test_they_can_be_chosen_for_a_device_that_is_here_as_well(report) -> None:
    found = report("--mem-limit", "1GB", "--device", "cpu", "--dtype", "bf16", "--optimizer", "sgd", "--fresh-grads")
    parameters = (256 * 1024 + 1024 + 1024 * 10 + 10) * 2
    assert parameters <= found["fixed_bytes"] < 1.2 * parameters


def test_the_other_reports_know_the_device(plan, model_file, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    options = ("--device", "h100", "--compare", "--sweep", "--trace", str(trace))
    assert plan(model_file(LABELS), *options).exit_code == 0
    assert trace.exists()


def test_several_devices_are_said_with_what_is_assumed_of_them(plan, model_file, tmp_path: Path) -> None:
    saved = tmp_path / "plan.json"
    result = plan(model_file(LABELS), "--device", "h100:8", "--precision", "bfloat16", "--json", "-", "--save", saved)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["device"] == "8 × NVIDIA H100 SXM 80 GB"
    assert report["prediction"]["devices"] == 8
    assert json.loads(saved.read_text())["predicted_for"] == "8 × NVIDIA H100 SXM 80 GB"
    assert report["prediction"]["predicted"]["communication_bytes"] > 0
    alone = json.loads(plan(model_file(LABELS), "--device", "h100", "--json", "-").stdout)
    assert report["prediction"]["exact"]["parameters_bytes"] < alone["prediction"]["exact"]["parameters_bytes"]


@pytest.mark.parametrize("page", [False, True], ids=["text", "page"])
def test_the_report_of_several_devices_says_the_words(plan, model_file, tmp_path: Path, page: bool) -> None:
    file = tmp_path / "page.html"
    result = plan(model_file(BLOCKS), "--device", "h100:8", *(["--html", file] if page else []))
    text = " ".join((file.read_text() if page else result.stdout).replace("\N{NO-BREAK SPACE}", " ").split())
    for words in (
        "8 × NVIDIA H100 SXM 80 GB",
        "Nothing was measured. Exact: parameters",
        "Predicted: peaks, what the allocator reserves,",
        "parameters that are whole, and gradients on their way.",
        "Assumed: the parts of the data sheet",
        "batches without padding; what devices send to each other is sent while they compute.",
        "reserved (predicted)",
        "fitted to",
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


def test_recurrent_layers_are_warned_of_by_name(plan, model_file, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = plan(model_file(RECURRENT), "--device", "h100", "--html", page)
    for text in (" ".join(result.stdout.split()), page.read_text()):
        assert "Warning: that is not so of the recurrent layers (1.lstm): they were planned with operators of" in text
    found = json.loads(plan(model_file(RECURRENT), "--device", "mi300x", "--json", "-").stdout)
    assert found["prediction"]["exact"]["inexact_layers"] == ["1.lstm"]


@pytest.mark.slow
def test_parameters_are_gathered_by_blocks_or_all_at_once(plan, model_file) -> None:
    def peak(*options: str) -> int:
        result = plan(model_file(BLOCKS), "--device", "h100:8", *options, "--json", "-")
        assert result.exit_code == 0
        return json.loads(result.stdout)["plan"]["peak_bytes"]

    by_default = peak()
    assert peak("--shard", "blocks") == by_default
    assert peak("--shard", "whole") > by_default


@pytest.mark.parametrize(
    ("options", "kind", "name"),
    [
        (["--device", "h1000"], "unknown_device", "--device"),
        (["--device", "a100"], "unknown_device", "--device"),
        (["--device", "h100:none"], "not_a_count", "--device"),
        (["--device", "h100", "--precision", "bfloat16"], "needs_option", "--precision"),
        (["--device", "h100", "--shard", "blocks"], "needs_option", "--shard"),
        (["--device", "h100:1", "--shard", "whole"], "needs_option", "--shard"),
        (["--device", "h100:1", "--precision", "bfloat16"], "needs_option", "--precision"),
        (["--device", "cuda:0", "--shard", "whole"], "needs_option", "--shard"),
        (["--device", "h100:8", "--precision", "int8"], "bad_value", "--precision"),
        (["--device", "h100", "--verify"], "excluded_together", "--verify"),
        (["--device", "h100", "--compile"], "excluded_together", "--compile"),
        (["--device", "h100", "--pipeline", "2"], "excluded_together", "--pipeline"),
        (["--autocast", "bfloat16"], "needs_option", "--autocast"),
        (["--device", "h100", "--autocast", "float32"], "bad_value", "--autocast"),
        (["--device", "cpu", "--device-memory", "1GB"], "excluded_together", "--device"),
        (["--device-memory", "much"], "not_a_size", "--device-memory"),
        (["--device-memory", "100MB"], "no_room", "--device-memory"),
        (["--device-memory", "500MB", "--device", "h100"], "no_room", "--device-memory"),
        (["--device-file", "nowhere.toml"], "FileNotFoundError", "--device-file"),
        (["--optimizer", "adanw"], "bad_value", "--optimizer"),
        (["--optimizer", "adamw-sparse"], "bad_value", "--optimizer"),
        (["--dtype", "int8"], "bad_value", "--dtype"),
    ],
)
def test_wrong_use_is_answered_in_one_sentence(plan, model_file, options: list[str], kind: str, name: str) -> None:
    result = plan(model_file(LABELS), *options)
    ends(result, 2, kind, name=name)
    assert len(result.stderr.strip().splitlines()) == 1


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


def test_what_is_assumed_of_amd_is_said(plan, model_file) -> None:
    text = " ".join(plan(model_file(LABELS), "--device", "mi300x").stdout.split())
    assert "kernels of ROCm (AOTriton, MIOpen) keep and take as much as CUDA's" in text
    assert "for hipBLAS" in text
    assert "cuBLAS" not in text
