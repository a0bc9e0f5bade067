"""What rotor-plan says when something is wrong: an exit code, one clear message, no traceback of its own."""

from __future__ import annotations

import json
import re
import runpy
import sys

import pytest

from rotor_py import parse_bytes
from tests.cli.conftest import FICKLE
from tests.fields import ends

HEAD = "import torch\nfrom torch import nn\n"


def test_an_infeasible_limit_ends_with_3_and_the_least_limit_works(plan, model_file):
    result = plan(model_file(), "--mem-limit", "500kB")
    assert result.exit_code == 3
    assert "Traceback" not in result.stderr
    advised = re.search(r"a limit of (\S+)\.$", result.stderr.strip())
    assert advised, result.stderr
    assert parse_bytes(advised[1]) > 500_000
    assert plan(model_file(), "--mem-limit", advised[1]).exit_code == 0


def test_where_no_plan_fits_the_stages_show_where_the_memory_is(plan, model_file):
    result = plan(model_file(), "--mem-limit", "500kB")
    assert result.stdout == ""
    table = result.stderr.partition("rotor-plan:")[0]
    assert re.search(r"^stage +forward +backward +output +kept +scratch *$", table, re.MULTILINE)
    assert re.search(r"^5\.1 .* [kM]?B *$", table, re.MULTILINE)
    assert "stored" not in table
    assert plan(model_file(), "--mem-limit", "500kB", "--quiet").stderr.startswith("rotor-plan:")


def test_the_insides_of_torch_do_not_precede_an_error_about_shapes(model_file, capfd, plan):
    text = "class Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    text += "        self.first, self.second = nn.Linear(8, 8), nn.Linear(9, 9)\n"
    text += "    def forward(self, x):\n        return self.second(self.first(x).tanh())\n"
    result = plan(model_file(f"{HEAD}{text}model, sample = Net(), torch.randn(4, 8)\n"), "--mem-limit", "1GB")
    assert result.exit_code == 4
    assert "mat1 and mat2 shapes cannot be multiplied (4x8 and 9x9)" in result.stderr
    assert "fake_tensor" not in result.stderr + capfd.readouterr().err


def test_a_refusal_names_fresh_gradients_only_where_gradients_are_held(plan, model_file):
    held, fresh = (plan(model_file(), "--mem-limit", "500kB", *more).stderr for more in ([], ["--fresh-grads"]))
    assert "Stage 0.0 alone keeps" in held
    assert "fresh_grads=True (--fresh-grads)" in held
    assert "fresh_grads" not in fresh


def test_the_least_limit_is_exact(plan, model_file):
    least = json.loads(plan(model_file(), "--mem-limit", "1GB", "--json", "-").stdout)["min_bytes"]
    assert plan(model_file(), "--mem-limit", least).exit_code == 0
    assert plan(model_file(), "--mem-limit", least - 1).exit_code == 3


@pytest.mark.parametrize(
    ("arguments", "kind", "name"),
    [
        (["--mem-limit", "4XB"], "unknown_unit", "--mem-limit"),
        (["--mem-limit", "0"], "not_positive", "--mem-limit"),
        (["--mem-limit", "-3GB"], "not_a_size", "--mem-limit"),
        (["--mem-limit", "120%"], "above_device", "--mem-limit"),
        (["--mem-limit", "1GB", "--device", "tpu"], "unknown_device", "--device"),
        (["--mem-limit", "1GB", "--device", "cuda:99"], "no_such_device", "--device"),
        (["--mem-limit", "1GB", "--input", "3,x"], "no_shape", "--input"),
        (["--mem-limit", "1GB", "--input", "8,4:text"], "no_shape", "--input"),
        (["--mem-limit", "1GB", "--batch", "0"], "bad_value", "--batch"),
        (["--mem-limit", "1GB", "--json", "no/such/folder/x.json"], "not_writable", "no/such/folder/x.json"),
        (["--mem-limit", "1e400GB"], "too_large", "--mem-limit"),
        (["--mem-limit", "1e99999999GB"], "too_large", "--mem-limit"),
    ],
)
def test_a_bad_value_ends_with_2_and_its_option_is_named(plan, model_file, arguments, kind, name):
    ends(plan(model_file(), *arguments), 2, kind, name=name)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--mem-limit", "1GB", "--slots", "0"], "slots"),
        (["--mem-limt", "1GB"], "mem-limit"),
        (["--budget", "1GB"], "'--mem-limit'"),
        (["--memory", "1GB"], "'--mem-limit'"),
    ],
)
def test_a_wrong_option_ends_with_2_and_is_named(plan, model_file, arguments, words):
    result = plan(model_file(), *arguments)
    assert result.exit_code == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("target", ["missing.py", "no_such_module:model", "nothing", "missing.py:net"])
def test_a_model_that_is_not_there_ends_with_2(plan, target):
    result = plan(target, "--mem-limit", "1GB")
    assert result.exit_code == 2
    assert target.partition(":")[0] in result.stderr


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"{HEAD}net = nn.Linear(1, 1)\n", "'model'"),
        (f"{HEAD}model = 3\nsample = torch.zeros(1)\n", "'model'"),
        (f"{HEAD}model = nn.Sequential(nn.Linear(1, 1))\n", "'sample'"),
    ],
)
def test_a_file_without_the_names_gets_one_that_works(plan, model_file, tmp_path, text, wanted):
    result = plan(model_file(text), "--mem-limit", "1GB")
    assert result.exit_code == 2
    assert wanted in result.stderr
    example = result.stderr.partition("A file that works:")[2]
    path = tmp_path / "example.py"
    path.write_text(example)
    assert "model" in runpy.run_path(str(path))
    assert plan(path, "--mem-limit", "1GB").exit_code == 0


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("class M(nn.Module):\n    def forward(self, x): return x\nmodel = M()", "no_graph"),
        ("model = nn.Sequential(nn.ReLU())", "no_gradient"),
        ("model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False))", "no_gradient"),
    ],
)
def test_a_model_that_cannot_be_planned_ends_with_2(plan, model_file, line, kind):
    result = plan(model_file(f"{HEAD}{line}\nsample = torch.zeros(8, 4)\n"), "--mem-limit", "1GB")
    ends(result, 2, kind)


@pytest.mark.parametrize(
    "line",
    [
        "raise RuntimeError('mine')",
        "def model():\n    raise RuntimeError('mine')",
        "class M(nn.Linear):\n    def forward(self, x):\n        raise RuntimeError('mine')\n"
        "model = nn.Sequential(M(4, 4))",
        "model = nn.Sequential(nn.Linear(4, 4))\ndef loss(y):\n    raise RuntimeError('mine')",
        "model = nn.Sequential(nn.Linear(4, 4))\ndef optimizer(p):\n    raise RuntimeError('mine')",
    ],
)
def test_an_error_of_the_model_ends_with_4_and_its_own_traceback(plan, model_file, line):
    path = model_file(f"{HEAD}sample = torch.zeros(8, 4)\n{line}\n")
    result = plan(path, "--mem-limit", "1GB")
    assert result.exit_code == 4
    assert "RuntimeError: mine" in result.stderr
    assert path in result.stderr
    for own in ("rotor_cli", "rotor_py", "rotor_profiling"):
        assert own not in result.stderr


def test_an_error_inside_torch_names_the_error(plan, model_file):
    text = f"{HEAD}model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))\nsample = torch.zeros(8, 4)\n"
    result = plan(model_file(text), "--mem-limit", "1GB")
    assert result.exit_code == 4
    assert "mat1 and mat2" in result.stderr


def test_a_loss_that_is_not_a_number_ends_with_2(plan, model_file):
    text = f"{HEAD}model = nn.Sequential(nn.Linear(4, 4))\nsample = torch.zeros(8, 4)\ndef loss(y): return y\n"
    result = plan(model_file(text), "--mem-limit", "1GB")
    ends(result, 2, "loss_not_a_number")


def test_an_interrupt_ends_with_130(plan, model_file):
    assert plan(model_file(f"{HEAD}raise KeyboardInterrupt\n"), "--mem-limit", "1GB").exit_code == 130


def test_an_unexpected_error_ends_with_1_and_says_how_to_see_more(plan, model_file, monkeypatch):
    def broken(*_: object) -> None:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr("rotor_cli.write_outputs.write_outputs", broken)
    result = plan(model_file(), "--mem-limit", "1GB")
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stderr
    assert "--traceback" in result.stderr
    assert isinstance(plan(model_file(), "--mem-limit", "1GB", "--traceback").exception, ZeroDivisionError)


def test_a_difference_found_by_verify_ends_with_5(plan, model_file, monkeypatch):
    report = json.loads(plan(model_file(FICKLE), "--mem-limit", "1GB", "--json", "-").stdout)
    result = plan(model_file(FICKLE), "--mem-limit", report["min_bytes"], "--verify")
    ends(result, 5, "verify_differs")
    sys.modules.pop("net", None)


@pytest.mark.parametrize(
    ("optimizer", "options", "kind", "name"),
    [
        ("", [], "no_optimizer", "--step-in-backward"),
        ("optimizer = torch.optim.LBFGS", [], "unsupported_optimizer", "--step-in-backward"),
        ("optimizer = torch.optim.SGD", ["--forwards-in-flight", 2], "excluded_together", "--step-in-backward"),
        ("optimizer = torch.optim.SGD", ["--batch", "max"], "excluded_together", "--step-in-backward"),
        ("optimizer = torch.optim.SGD", ["--pipeline", 2], "excluded_together", "--step-in-backward"),
    ],
)
def test_what_stepping_in_the_backward_excludes(plan, model_file, optimizer, options, kind, name):
    text = f"{HEAD}model, sample = nn.Linear(4, 4), torch.randn(2, 4)\n{optimizer}\n"
    result = plan(model_file(text), "--mem-limit", "1GB", "--step-in-backward", *options)
    ends(result, 2, kind, name=name)
