"""What rotor-plan prints and writes when all is well, with --compare too."""

import ast
import json
import re
import runpy
from pathlib import Path

import pytest
import torch

from rotor_cli.text_report import typed
from rotor_py import Checkpointable, parse_bytes
from rotor_py.report.terminal import folded
from rotor_solver import Sequence
from tests.cli.conftest import FICKLE, SMALL
from tests.fields import ends, invoke

STEPPING, INPUT = "step-in-backward", ("--input", "16,3,32,32")


@pytest.fixture(scope="module")
def loose(tmp_path_factory) -> dict:
    file, found = (tmp_path_factory.mktemp("loose") / name for name in ("net.py", "found.json"))
    file.write_text(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("COLUMNS", raising=False)  # of the terminal that the tests run in
        text = invoke(file, "--mem-limit", "1GB", "--json", found).stdout
    return {**json.loads(found.read_text()), "text": text}


def test_json_has_every_key_text_shows_how_to_use_it_and_everything_is_stored_where_it_fits(loose):
    assert (loose["schema"], loose["device"], loose["mem_limit"]) == (1, "cpu", 10**9)
    expected = {"schema", "device", "mem_limit", "fixed_bytes", "min_bytes", "store_all", "plan", "stages"}
    assert set(loose) == expected | {"time_spread", "text"}
    assert set(loose["store_all"]) == {"peak_bytes", "step_seconds"}
    expected = {"peak_bytes", "step_seconds", "overhead", "sequence", "algorithm", "gap"}
    assert set(loose["plan"]) == expected | {"forwards_in_flight", "backward_order", "sequences"}
    assert loose["plan"]["sequences"] == [loose["plan"]["sequence"]]
    expected = {"name", "action", "in_part", "ways", "activation_bytes", "saved_bytes"}
    expected |= {f"{way}_seconds" for way in ("forward", "nograd", "backward")}
    expected |= {f"{way}_temp_bytes" for way in ("forward", "nograd", "backward", "replay")}
    assert set(loose["stages"][0]) == expected
    assert (loose["plan"]["overhead"], loose["plan"]["gap"]) == (1, 0)
    assert {stage["action"] for stage in loose["stages"]} == {"stored"}
    parameters, loss_and_its_gradient = 4 * ((3 * 9 + 1) * 8 + 5 * (8 * 9 + 1) * 8), 4 + 4
    assert loose["fixed_bytes"] == 3 * parameters + loss_and_its_gradient  # with gradients and momenta
    text = loose["text"]
    for words in ("net.py fits", "limit", "least", "store-all", "planned", "overhead", "stage", "5.1", "what happens"):
        assert words in text
    assert "sequence  Fe_0…11, L, B_11…0" in text
    assert 'Checkpointable(model, mem_limit="1GB", loss=loss, optimizer=optimizer)' in text
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text


def test_a_tight_limit_is_kept_costs_time_and_is_verified_and_saved(plan, model_file, loose, tmp_path, monkeypatch):
    limit, saved = (loose["min_bytes"] + loose["store_all"]["peak_bytes"]) // 20 * 10 + 7, Path('a "plan".json')
    monkeypatch.chdir(tmp_path)
    printed = plan(model_file(), "--mem-limit", limit, "--verify", "--json", tmp_path / "found.json").stdout
    found = json.loads((tmp_path / "found.json").read_text())
    written = parse_bytes(ast.literal_eval(printed.partition("mem_limit=")[2].partition(", loss")[0]))
    assert found["plan"]["peak_bytes"] <= written <= limit
    assert limit < loose["plan"]["peak_bytes"]
    assert found["plan"]["overhead"] > 1
    assert any("recomputed" in stage["action"] for stage in found["stages"])
    Sequence.parse(found["plan"]["sequence"])
    assert found["verify"]["max_grad_difference"] == 0
    assert 0.98 * found["plan"]["peak_bytes"] <= found["verify"]["measured_peak_bytes"] <= limit
    assert found["verify"]["measured_step_seconds"] > 0
    used = plan(model_file(), "--mem-limit", limit, "--save", saved).stdout
    assert ast.literal_eval(used.partition("plan=")[2].partition(")")[0]) == str(saved)
    monkeypatch.setattr("rotor_py.plan.source.measure", None)
    model = Checkpointable(runpy.run_path(model_file())["model"], plan=saved)
    model(torch.randn(8, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_freed_gradients_make_room_and_stepping_in_the_backward_more(plan, report, model_file, loose):
    fresh, freed = (report(model_file(), "--mem-limit", "1GB", f"--{more}") for more in ("fresh-grads", STEPPING))
    assert fresh["fixed_bytes"] < loose["fixed_bytes"]
    assert freed["min_bytes"] < fresh["min_bytes"] < loose["min_bytes"]
    assert freed["freed_gradient_bytes"] > 0
    assert "freed_gradient_bytes" not in fresh
    result = plan(model_file(), "--mem-limit", freed["min_bytes"], f"--{STEPPING}", "--verify")
    assert result.exit_code == 0
    assert "of gradients are freed in the backward, which steps parameters." in result.stdout
    assert "parameters after the step and buffers differ by at most 0" in " ".join(result.stdout.split())
    assert "step_in_backward=optimizer" in result.stdout


def test_limits_and_sequences_are_written_so_that_people_can_read_them():
    for limit, peak, written in (
        (22_007_619_993, 21_900_000_000, '"22GB"'),
        (22_007_619_993, 22_005_000_000, '"22007.61MB"'),
        (22_007_619_993, 22_007_619_993, "22_007_619_993"),
        (2_600_000, 2_500_000, '"2.6MB"'),
        (900, 900, "900"),
    ):
        assert typed(limit, peak) == written
    sequence = Sequence.parse("Fe_0, CF_1, Fn_2, Fn_3, Fn_4, Fe_5, Fe_6, L, B_6, B_5, Fe_1, Fe_3")
    assert ", ".join(folded(sequence)) == "Fe_0, CF_1, Fn_2…4, Fe_5, Fe_6, L, B_6, B_5, Fe_1, Fe_3"


def test_batch_and_input_replace_the_sample_which_may_be_a_tensor_tuple_dict_or_function(report, model_file, loose):
    twice, same = (report(model_file(), "--mem-limit", "1GB", *more) for more in (("--batch", 16), INPUT))
    assert twice["stages"][0]["activation_bytes"] == 2 * loose["stages"][0]["activation_bytes"]
    assert same["min_bytes"] == twice["min_bytes"]
    head = "import torch\nfrom torch import nn\ndef model():\n    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())\n"
    zeros = "torch.zeros(8, 4)"
    samples = (zeros, f"({zeros},)", f"{{'input': {zeros}}}", "lambda n: torch.zeros(n, 4)")
    files = (model_file(f"{head}sample = {sample}\n", f"net{at}.py") for at, sample in enumerate(samples))
    assert len({report(file, "--mem-limit", "1MB", "--batch", 8)["min_bytes"] for file in files}) == 1


def test_another_name_and_a_module_path_are_found(plan, model_file, tmp_path, monkeypatch):
    text = "import torch\nfrom torch import nn\nnet = nn.Sequential(nn.Linear(4, 4))\nsample = torch.zeros(8, 4)\n"
    path = model_file(text, "named_net_module.py")
    assert plan(f"{path}:net", "--mem-limit", "1MB").exit_code == 0
    monkeypatch.syspath_prepend(str(tmp_path))
    assert plan("named_net_module:net", "--mem-limit", "1MB").exit_code == 0


def test_a_loss_that_is_no_number_is_named_and_the_measured_overhead_stands_beside_the_predicted(plan, model_file):
    text = "import torch\nfrom torch import nn\nmodel = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))\n"
    text += "sample = torch.randn(4, 8)\ndef loss(output):\n    return output.sum() * {}\n"
    for factor, named in (("float('nan')", True), ("1", False)):
        shown = plan(model_file(text.format(factor)), "--mem-limit", "1GB", "--verify").stdout.replace("\n", " ")
        assert ("the loss is nan, so equal gradients say little" in shown) == named
        assert re.search(r"[+-]\d+\.\d% over plain +\(\+0\.0% predicted\); +plain +step +\d", shown)


def test_the_order_of_backwards_is_planned_for_and_shown(plan, model_file, tmp_path):
    arguments = ["--mem-limit", "1GB", "--forwards-in-flight", "2", "--backward-order", "reverse"]
    text = "".join(plan(model_file(), *arguments, "--json", tmp_path / "found.json").stdout.split())
    found = json.loads((tmp_path / "found.json").read_text())["plan"]
    assert (found["forwards_in_flight"], found["backward_order"]) == (2, "reverse")
    assert len(found["sequences"]) == 2
    assert "forwards_in_flight=2,backward_order='reverse'" in text


def test_the_optimal_plan_comes_first_none_that_fits_is_faster_and_all_of_it_trains(plan, report, model_file, tmp_path):
    stored, file = report(model_file(), "--sweep")["store_all"]["peak_bytes"], tmp_path / "report.json"
    shown = plan(model_file(), "--mem-limit", int(0.85 * stored), "--compare", "--verify", "--json", file).stdout
    found = json.loads(file.read_text())
    listed, rows = found["compare"], {row["strategy"]: row for row in found["compare"]}
    assert listed[0]["strategy"] == "optimal"
    assert listed[0]["peak_bytes"] == found["plan"]["peak_bytes"]
    assert listed[0]["overhead"] == found["plan"]["overhead"]
    expected = {"optimal", "level 1", "sqrt", "revolve", "griewank-heterogeneous", "store-all", "recompute-all"}
    assert expected < set(rows)
    (every,) = (name for name in rows if name.startswith("every "))
    fitting = [row for row in listed if row["fits"]]
    assert 1 < len(fitting) < len(listed)
    assert listed[: len(fitting)] == fitting
    for row in listed:
        assert row["fits"] == (row["peak_bytes"] <= found["mem_limit"]) == ("measured_peak_bytes" in row)
        assert row["overhead"] == pytest.approx(row["step_seconds"] / found["store_all"]["step_seconds"])
        if row["fits"]:
            assert 0.98 * row["peak_bytes"] <= row["measured_peak_bytes"] <= row["peak_bytes"]
            assert row["max_grad_difference"] == 0
            assert row["measured_step_seconds"] > 0
    peaks = {row["measured_peak_bytes"] for row in fitting}
    assert max(peaks) > 1.1 * min(peaks), "all strategies trained in the same way"
    assert rows["optimal"]["measured_peak_bytes"] == found["verify"]["measured_peak_bytes"]
    assert rows["store-all"]["peak_bytes"] == found["store_all"]["peak_bytes"] == stored
    assert rows["store-all"]["overhead"] == 1
    assert rows["recompute-all"]["peak_bytes"] == found["min_bytes"]
    # The table is shown below the plan.
    heading, *lines = shown.partition("\nstrategy ")[2].splitlines()
    assert heading.split() == ["fits", "peak", "time", "overhead", "peak", "time"]
    cells = {line.split("  ")[0]: line.split() for line in lines if line.strip()}
    assert next(iter(cells)) == "optimal"
    assert "yes" in cells["optimal"]
    assert "+0.0%" in cells["store-all"]
    assert "no" in cells["store-all"]
    # A row is what a Checkpointable does that is asked for it by hand.
    for name, argument in (("level 1", {"level": 1}), (every, {"every_n_layers": int(every.split()[1])})):
        given = runpy.run_path(model_file())
        model, given["optimizer"] = given["model"], given["optimizer"](given["model"].parameters())
        options = {name: given[name] for name in ("loss", "optimizer")}
        network = Checkpointable(model, torch.randn(8, 3, 32, 32), **options, **argument)
        assert network.budget.peak_bytes(network.sequence) == rows[name]["peak_bytes"]


def test_a_plan_or_a_strategy_that_changes_gradients_ends_with_5_and_is_named(plan, report, model_file):
    path = model_file(FICKLE, "fickle_net.py")
    least = report(path, "--mem-limit", "1GB", "--verify")["min_bytes"]
    ends(plan(path, "--mem-limit", least, "--verify"), 5, "verify_differs")
    result = plan(path, "--mem-limit", "1GB", "--verify", "--compare")
    assert result.exit_code == 5
    differ = r"rotor-plan: (?!optimal|store-all)\S.*: gradients or buffers differ from plain training by up to \S+\n"
    assert re.fullmatch(differ, result.stderr), result.stderr
