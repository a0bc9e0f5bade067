"""rotor-plan --batch max and --batch best: how large a batch."""

from __future__ import annotations

import json

import pytest

from rotor_cli.charts import CHOSEN, PLANNED, STORED, batch_chart
from rotor_py.report.batch_choice import BatchChoice, BatchPoint
from tests.cli.conftest import SMALL
from tests.fields import ends

TWO_INPUTS = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
    def forward(self, x, bias):
        return self.layer(x) + bias.sum()

model = Model()
sample = torch.randn(8, 4), torch.randn(3, 4)
"""


def json_of(result):
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_max_is_the_batch_of_which_one_more_finds_no_plan(plan, model_file):
    file = model_file()
    report = json_of(plan(file, "--mem-limit", "2.6MB", "--batch", "max", "--json", "-"))
    batch = report["batch"]["batch"]
    assert report["batch"]["largest"] == batch
    assert report["batch"]["beyond"]["batch"] == batch + 1
    assert report["batch"]["beyond"]["needed_bytes"] > 2_600_000
    assert report["plan"]["peak_bytes"] <= 2_600_000
    assert report["batch"]["measured_peak_bytes"] <= 2_600_000
    alone = json_of(plan(file, "--mem-limit", "2.6MB", "--batch", batch, "--json", "-"))
    assert alone["min_bytes"] == report["min_bytes"]
    assert plan(file, "--mem-limit", "2.6MB", "--batch", batch + 1).exit_code == 3
    stored = report["batch"]["largest_stored"]
    assert json_of(plan(file, "--mem-limit", "2.6MB", "--batch", stored, "--json", "-"))["plan"]["overhead"] == 1
    more = json_of(plan(file, "--mem-limit", "2.6MB", "--batch", stored + 1, "--json", "-"))
    assert more["store_all"]["peak_bytes"] > 2_600_000


def test_best_is_a_multiple_has_a_plan_a_chart_and_a_picture(plan, model_file, tmp_path):
    page = tmp_path / "plan.html"
    saved = tmp_path / "plan.json"
    result = plan(
        model_file(), "--mem-limit", "4MB", "--batch", "best", "--batch-multiple", 3,
        "--json", saved, "--html", page,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(saved.read_text())["batch"]
    assert found["batch"] % 3 == 0
    assert found["gap"] >= 0
    assert all(point["batch"] % 3 == 0 for point in found["points"])
    assert f"A batch of {found['batch']} has the most samples a second" in " ".join(result.stdout.split())
    assert f"# {found['batch']} samples" in result.stdout
    assert CHOSEN in result.stdout
    assert '<svg id="batch"' in page.read_text()
    measured = found["measured_samples_per_second"]
    if measured:
        assert measured[str(found["batch"])] == max(measured.values())


def test_accumulation_keeps_the_effective_batch(plan, model_file):
    arguments = ("--mem-limit", "2.6MB", "--batch", "max", "--grad-accumulation", 60)
    found = json_of(plan(model_file(), *arguments, "--json", "-"))["batch"]
    assert found["batch"] * found["accumulation_steps"] == found["effective_batch"] == 60
    text = " ".join(plan(model_file(), *arguments).stdout.split())
    assert f"Step the optimizer after {found['accumulation_steps']} batches of {found['batch']}: 60 samples." in text
    assert f"optimizer.step() after every {found['accumulation_steps']}" in text


@pytest.mark.parametrize(
    "arguments", [(), ("--input", "4,3,32,32")], ids=["the sample of the file", "an input from the command line"]
)
def test_a_sample_that_is_a_tensor_is_scaled_along_its_first_dimension(plan, model_file, arguments):
    text = SMALL.replace("def sample(batch):\n    return torch.randn(batch,", "sample = (torch.randn(4,") + ""
    text = text.replace("3, 32, 32)\n\ndef loss", "3, 32, 32),)\n\ndef loss")
    found = json_of(plan(model_file(text), "--mem-limit", "2.6MB", "--batch", "max", *arguments, "--json", "-"))
    expected = json_of(plan(model_file(), "--mem-limit", "2.6MB", "--batch", "max", "--json", "-"))
    assert found["batch"]["batch"] == expected["batch"]["batch"]


def test_inputs_without_a_dimension_in_common_are_refused(plan, model_file):
    result = plan(model_file(TWO_INPUTS), "--mem-limit", "1MB", "--batch", "max")
    ends(result, 2, "no_batch_dimension")


@pytest.mark.parametrize(
    ("arguments", "kind", "name"),
    [
        (("--batch", "big"), "bad_value", "--batch"),
        (("--batch", "8", "--batch-multiple", "2"), "needs_option", "--batch-multiple"),
        (("--grad-accumulation", "64"), "needs_option", "--grad-accumulation"),
        (("--batch", "max", "--max-overhead", "10%"), "excluded_together", "--max-overhead"),
        (("--batch", "max", "--compile"), "excluded_together", "--compile"),
        (("--batch", "max", "--fresh-grads", "--grad-accumulation", "64"), "excluded_together", "--fresh-grads"),
        (
            ("--batch", "max", "--batch-multiple", "8", "--grad-accumulation", "20"),
            "not_divisible",
            "--grad-accumulation",
        ),
        (("--batch", "max", "--pipeline", "2"), "excluded_together", "--batch max"),
    ],
)
def test_wrong_use_is_told_in_a_sentence(plan, model_file, arguments, kind, name):
    result = plan(model_file(), *arguments)
    ends(result, 2, kind, name=name)


def test_a_limit_that_no_batch_fits_ends_with_what_the_least_needs(plan, model_file):
    result = plan(model_file(), "--mem-limit", "100kB", "--batch", "best")
    ends(result, 3, "no_batch_fits")


def choice_of(points: tuple[BatchPoint, ...], **changes) -> BatchChoice:
    return BatchChoice(
        **{
            "aim": "max", "batch": points[-1].batch, "mem_limit": 1000, "step_seconds": 1.0, "optimizer_seconds": 0.5,
            "overhead": 1.5, "samples_per_second": points[-1].samples_per_second, "largest": points[-1].batch,
            "largest_stored": 4, "points": points, **changes,
        }
    )  # fmt: skip


def test_the_chart_has_a_line_for_plans_and_one_for_storing_everything():
    points = (BatchPoint(1, 10, 10, False), BatchPoint(4, 20, 20, True), BatchPoint(16, 40, None, True))
    lines = batch_chart(choice_of(points), 60)
    assert max(map(len, lines)) <= 60
    assert sum(line.count(STORED) for line in lines) == 2
    assert sum(line.count(PLANNED) for line in lines) == 0, "where both are, nothing is recomputed"
    assert lines[0].endswith(CHOSEN)
    assert lines[0].startswith("    40.0")
    assert batch_chart(choice_of(points[:1], largest_stored=1), 60), "of a single batch"
