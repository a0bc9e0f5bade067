"""rotor-plan --batch max and --batch best: how large a batch."""

import json
from dataclasses import replace

from rotor_cli.text_report import CHOSEN, PLANNED, STORED, batch_chart
from rotor_py.report.sweep import BatchChoice, BatchPoint
from tests.cli.conftest import SMALL
from tests.fields import ends

TWO_INPUTS = """
import torch

model, sample = torch.nn.Bilinear(4, 4, 4), (torch.randn(8, 4), torch.randn(3, 4))
"""


def test_max_is_the_batch_of_which_one_more_needs_more_than_the_limit_also_of_tensors(report, model_file):
    tensor = SMALL.replace("def sample(batch):\n    return torch.randn(batch,", "sample = torch.randn(4,")
    wholes = [
        report(model_file(text), "--mem-limit", "2.6MB", "--batch", "max", *more)
        for text, more in ((SMALL, ()), (tensor, ()), (SMALL, ("--input", "4,3,32,32")))
    ]
    for whole, found in ((whole, whole["batch"]) for whole in wholes):
        assert found["largest"] == found["batch"] == found["beyond"]["batch"] - 1 == wholes[0]["batch"]["batch"] > 4
        assert found["beyond"]["needed_bytes"] > 2_600_000
        assert max(whole["plan"]["peak_bytes"], found["measured_peak_bytes"]) <= 2_600_000


def test_best_is_a_multiple_with_plan_chart_and_picture_and_accumulation_keeps_the_batch(plan, model_file, tmp_path):
    page, saved = tmp_path / "plan.html", tmp_path / "plan.json"
    options = ("--batch", "best", "--batch-multiple", 3, "--grad-accumulation", 60, "--json", saved, "--html", page)
    result = plan(model_file(), "--mem-limit", "4MB", *options)
    assert result.exit_code == 0, result.output
    text, found = " ".join(result.stdout.split()), json.loads(saved.read_text())["batch"]
    assert found["batch"] % 3 == 0
    assert found["batch"] * found["accumulation_steps"] == found["effective_batch"] == 60
    assert f"Step the optimizer after {found['accumulation_steps']} batches of {found['batch']}: 60 samples." in text
    assert f"optimizer.step() after every {found['accumulation_steps']}" in text
    assert found["gap"] >= 0
    assert all(point["batch"] % 3 == 0 for point in found["points"])
    assert f"A batch of {found['batch']} has the most samples a second" in text
    assert f"# {found['batch']} samples" in result.stdout
    assert CHOSEN in result.stdout
    assert '<svg id="batch"' in page.read_text()
    if measured := found["measured_samples_per_second"]:
        assert measured[str(found["batch"])] == max(measured.values())


def test_inputs_without_a_dimension_in_common_and_a_limit_that_no_batch_fits_are_refused(plan, model_file):
    ends(plan(model_file(TWO_INPUTS), "--mem-limit", "1MB", "--batch", "max"), 2, "no_batch_dimension")
    ends(plan(model_file(), "--mem-limit", "100kB", "--batch", "best"), 3, "no_batch_fits")


def test_the_chart_has_a_line_for_plans_and_one_for_storing_everything():
    points = (BatchPoint(1, 10, 10, False), BatchPoint(4, 20, 20, True), BatchPoint(16, 40, None, True))
    seconds = {"step_seconds": 1.0, "optimizer_seconds": 0.5, "overhead": 1.5, "samples_per_second": 40.0}
    choice = BatchChoice(aim="max", batch=16, mem_limit=1000, largest=16, largest_stored=4, points=points, **seconds)
    lines = batch_chart(choice, 60)
    assert max(map(len, lines)) <= 60
    assert sum(line.count(STORED) for line in lines) == 2
    assert sum(line.count(PLANNED) for line in lines) == 0, "where both are, nothing is recomputed"
    assert lines[0].endswith(CHOSEN)
    assert lines[0].startswith("    40.0")
    one = {"batch": 1, "largest": 1, "largest_stored": 1, "samples_per_second": 10.0}
    assert batch_chart(replace(choice, points=points[:1], **one), 60), "of a single batch"
