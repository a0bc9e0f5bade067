"""What rotor-plan prints and writes when all is well."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest
import torch

from rotor_cli.text_report import typed
from rotor_py import Checkpointable, parse_bytes
from rotor_py.report.terminal import folded
from rotor_py.units import format_seconds
from rotor_solver import Sequence


def between(report: dict, share: float = 0.5) -> int:
    least, most = report["min_bytes"], report["store_all"]["peak_bytes"]
    return int(least + share * (most - least))


@pytest.fixture
def loose(plan, model_file) -> dict:
    """The report for a limit that holds everything."""
    return json.loads(plan(model_file(), "--mem-limit", "1GB", "--json", "-").stdout)


def test_json_has_every_key_of_the_schema(loose):
    assert loose["schema"] == 1
    assert loose["device"] == "cpu"
    assert loose["mem_limit"] == 10**9
    assert set(loose) == {
        "schema",
        "device",
        "mem_limit",
        "fixed_bytes",
        "min_bytes",
        "store_all",
        "plan",
        "stages",
        "time_spread",
    }
    assert set(loose["store_all"]) == {"peak_bytes", "step_seconds"}
    of_forwards = {"forwards_in_flight", "backward_order", "sequences"}
    expected = {"peak_bytes", "step_seconds", "overhead", "sequence", "algorithm", "gap"}
    assert set(loose["plan"]) == expected | of_forwards
    assert loose["plan"]["sequences"] == [loose["plan"]["sequence"]]
    expected = {"name", "forward_seconds", "backward_seconds", "activation_bytes", "saved_bytes"}
    expected |= {"forward_temp_bytes", "backward_temp_bytes", "action"}
    assert expected <= set(loose["stages"][0])


def test_everything_is_stored_where_it_fits(loose):
    assert loose["plan"]["sequence"].startswith("Fe_0, Fe_1")
    assert loose["plan"]["overhead"] == 1
    assert loose["plan"]["gap"] == 0
    assert {stage["action"] for stage in loose["stages"]} == {"stored"}


def test_a_tight_limit_is_kept_and_costs_time(plan, model_file, loose):
    limit = between(loose)
    report = json.loads(plan(model_file(), "--mem-limit", limit, "--json", "-").stdout)
    assert report["plan"]["peak_bytes"] <= limit < loose["plan"]["peak_bytes"]
    assert report["plan"]["overhead"] > 1
    assert any("recomputed" in stage["action"] for stage in report["stages"])
    Sequence.parse(report["plan"]["sequence"])


def test_fixed_part_is_parameters_gradients_and_optimizer_state(loose):
    parameters = 4 * ((3 * 9 + 1) * 8 + 5 * (8 * 9 + 1) * 8)
    loss_and_its_gradient = 4 + 4
    assert loose["fixed_bytes"] == 3 * parameters + loss_and_its_gradient


def test_fresh_gradients_make_room(plan, model_file, loose):
    fresh = json.loads(plan(model_file(), "--mem-limit", "1GB", "--fresh-grads", "--json", "-").stdout)
    assert fresh["fixed_bytes"] < loose["fixed_bytes"]
    assert fresh["min_bytes"] < loose["min_bytes"]


def test_stepping_in_the_backward_makes_more_room(plan, model_file, loose):
    fresh, freed = (
        json.loads(plan(model_file(), "--mem-limit", "1GB", more, "--json", "-").stdout)
        for more in ("--fresh-grads", "--step-in-backward")
    )
    assert freed["min_bytes"] < fresh["min_bytes"]
    assert freed["freed_gradient_bytes"] > 0
    assert "freed_gradient_bytes" not in fresh
    result = plan(model_file(), "--mem-limit", freed["min_bytes"], "--step-in-backward", "--verify")
    assert result.exit_code == 0
    assert "of gradients are freed in the backward, which steps parameters." in result.stdout
    assert "parameters after the step and buffers differ by at most 0" in " ".join(result.stdout.split())
    assert "step_in_backward=optimizer" in result.stdout


def test_verify_measures_a_step_inside_the_limit_with_equal_gradients(plan, model_file, loose):
    limit = between(loose)
    result = plan(model_file(), "--mem-limit", limit, "--verify", "--json", "-")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["verify"]["max_grad_difference"] == 0
    assert report["verify"]["measured_peak_bytes"] <= limit
    assert report["verify"]["measured_peak_bytes"] >= 0.98 * report["plan"]["peak_bytes"]
    assert report["verify"]["measured_step_seconds"] > 0


def test_the_text_shows_memory_time_stages_sequence_and_how_to_use_it(plan, model_file):
    result = plan(model_file(), "--mem-limit", "1GB")
    assert result.exit_code == 0
    for words in ("net.py fits", "limit", "least", "store-all", "planned", "overhead", "stage", "5.1", "what happens"):
        assert words in result.stdout
    assert "sequence  Fe_0…11, L, B_11…0" in result.stdout
    assert 'Checkpointable(model, mem_limit="1GB", loss=loss, optimizer=optimizer)' in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert "\x1b" not in result.stdout


def test_the_limit_in_the_three_lines_is_not_more_than_the_limit(plan, model_file, loose):
    limit = between(loose) // 10 * 10 + 7
    result = json.loads(plan(model_file(), "--mem-limit", limit, "--json", "-").stdout)
    printed = plan(model_file(), "--mem-limit", limit).stdout
    written = parse_bytes(ast.literal_eval(printed.partition("mem_limit=")[2].partition(", loss")[0]))
    assert result["plan"]["peak_bytes"] <= written <= limit


@pytest.mark.parametrize(
    ("limit", "peak", "written"),
    [
        (22_007_619_993, 21_900_000_000, '"22GB"'),
        (22_007_619_993, 22_005_000_000, '"22007.61MB"'),
        (22_007_619_993, 22_007_619_993, "22_007_619_993"),
        (4_000_000_000, 4_000_000_000, '"4GB"'),
        (2_600_000, 2_500_000, '"2.6MB"'),
        (900, 900, "900"),
    ],
)
def test_a_limit_is_written_so_that_people_can_read_it(limit, peak, written):
    assert typed(limit, peak) == written


def test_a_saved_plan_trains_without_measuring(plan, model_file, loose, tmp_path: Path, monkeypatch):
    saved = tmp_path / "plan.json"
    result = plan(model_file(), "--mem-limit", between(loose), "--save", saved)
    assert result.exit_code == 0
    assert f'plan="{saved}"' in result.stdout
    namespace: dict = {}
    exec(Path(model_file()).read_text(), namespace)
    monkeypatch.setattr("rotor_py.plan.sources.layer_source.measure", None)
    model = Checkpointable(namespace["model"], plan=saved)
    model(torch.randn(8, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_batch_and_input_replace_the_sample(plan, model_file, loose):
    twice = json.loads(plan(model_file(), "--mem-limit", "1GB", "--batch", 16, "--json", "-").stdout)
    same = json.loads(plan(model_file(), "--mem-limit", "1GB", "--input", "16,3,32,32", "--json", "-").stdout)
    assert twice["stages"][0]["activation_bytes"] == 2 * loose["stages"][0]["activation_bytes"]
    assert same["min_bytes"] == twice["min_bytes"]


def test_a_sample_may_be_a_tensor_tuple_dict_or_function(plan, model_file):
    head = "import torch\nfrom torch import nn\ndef model():\n    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())\n"
    reports = []
    for sample in (
        "torch.zeros(8, 4)",
        "(torch.zeros(8, 4),)",
        "{'input': torch.zeros(8, 4)}",
        "lambda n: torch.zeros(n, 4)",
    ):
        result = plan(model_file(f"{head}sample = {sample}\n"), "--mem-limit", "1MB", "--batch", 8, "--json", "-")
        assert result.exit_code == 0, result.output
        reports.append(json.loads(result.stdout)["min_bytes"])
    assert len(set(reports)) == 1


def test_another_name_and_a_module_path_are_found(plan, model_file, tmp_path, monkeypatch):
    text = "import torch\nfrom torch import nn\nnet = nn.Sequential(nn.Linear(4, 4))\nsample = torch.zeros(8, 4)\n"
    path = model_file(text, "named_net_module.py")
    assert plan(f"{path}:net", "--mem-limit", "1MB").exit_code == 0
    monkeypatch.syspath_prepend(str(tmp_path))
    assert plan("named_net_module:net", "--mem-limit", "1MB").exit_code == 0


def test_runs_are_folded_and_nothing_else():
    sequence = Sequence.parse("Fe_0, CF_1, Fn_2, Fn_3, Fn_4, Fe_5, Fe_6, L, B_6, B_5, Fe_1, Fe_3")
    assert ", ".join(folded(sequence)) == "Fe_0, CF_1, Fn_2…4, Fe_5, Fe_6, L, B_6, B_5, Fe_1, Fe_3"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.00 µs"), (1.5e-6, "1.50 µs"), (0.0421, "42.1 ms"), (12, "12.0 s")]
)
def test_seconds_have_three_digits_and_a_unit(seconds, text):
    assert format_seconds(seconds) == text


def test_a_loss_that_is_no_number_is_named_and_the_measured_overhead_stands_beside_the_predicted(plan, model_file):
    text = "import torch\nfrom torch import nn\nmodel = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))\n"
    text += "sample = torch.randn(4, 8)\ndef loss(output):\n    return output.sum() * {}\n"
    for factor, named in (("float('nan')", True), ("1", False)):
        shown = plan(model_file(text.format(factor)), "--mem-limit", "1GB", "--verify").stdout.replace("\n", " ")
        assert ("the loss is nan, so equal gradients say little" in shown) == named
        assert re.search(r"[+-]\d+\.\d% over plain +\(\+0\.0% predicted\); +plain +step +\d", shown)


def test_the_order_of_backwards_is_planned_for_and_shown(plan, model_file):
    arguments = ["--mem-limit", "1GB", "--forwards-in-flight", "2", "--backward-order", "reverse"]
    found = json.loads(plan(model_file(), *arguments, "--json", "-").stdout)["plan"]
    assert (found["forwards_in_flight"], found["backward_order"]) == (2, "reverse")
    assert len(found["sequences"]) == 2
    shown = "".join(plan(model_file(), *arguments).stdout.split())
    assert "forwards_in_flight=2,backward_order='reverse'" in shown
