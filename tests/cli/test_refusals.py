"""What rotor-plan says when something is wrong: an exit code, one clear message, no traceback of its own."""

import re
from unittest.mock import Mock

import pytest

from rotor_py import parse_bytes
from tests.fields import ends

HEAD = "import torch\nfrom torch import nn\n"


def test_a_limit_that_no_plan_fits_ends_with_3_the_stages_and_the_least_limit_which_works(plan, report, model_file):
    result = plan(model_file(), "--mem-limit", "500kB")
    ends(result, 3, "limit_too_small")
    assert result.stdout == ""
    table = result.stderr.partition("rotor-plan:")[0]
    assert re.search(r"^stage +forward +backward +output +kept +scratch *$", table, re.MULTILINE)
    assert re.search(r"^5\.1 .* [kM]?B *$", table, re.MULTILINE)
    assert "stored" not in table
    assert "Stage 0.0 alone keeps" in result.stderr
    assert "fresh_grads=True (--fresh-grads)" in result.stderr
    quiet = plan(model_file(), "--mem-limit", "500kB", "--quiet", "--fresh-grads").stderr
    assert quiet.startswith("rotor-plan:")
    assert "fresh_grads" not in quiet, "named only where gradients are held"
    advised = re.search(r"a limit of (\S+)\.$", result.stderr.strip())
    assert advised, result.stderr
    least = report(model_file(), "--mem-limit", advised[1])["min_bytes"]
    assert 500_000 < least <= parse_bytes(advised[1])
    assert plan(model_file(), "--mem-limit", least).exit_code == 0
    assert plan(model_file(), "--mem-limit", least - 1).exit_code == 3


def test_the_insides_of_torch_do_not_precede_an_error_about_shapes(model_file, capfd, plan):
    text = "class Net(nn.Bilinear):\n    def forward(self, x):\n        return nn.Linear(9, 9)(x.tanh() * self.bias)\n"
    text += "model, sample = Net(8, 8, 8), torch.randn(4, 8)\n"
    result = plan(model_file(HEAD + text), "--mem-limit", "1GB")
    assert result.exit_code == 4
    assert "mat1 and mat2 shapes cannot be multiplied (4x8 and 9x9)" in result.stderr
    assert "fake_tensor" not in result.stderr + capfd.readouterr().err


# Arguments, kind and option of each failure. The model file raises if it is loaded.
WRONG_USE = """
--mem-limit 4XB | unknown_unit | --mem-limit
--mem-limit -3GB | not_a_size | --mem-limit
--mem-limit 120% | above_device | --mem-limit
--device tpu | unknown_device | --device
--device cuda:99 | no_such_device | --device
--input 3,x | no_shape | --input
--json no/such/folder/x.json | not_writable | no/such/folder/x.json
--html - | stdout_is_for_json | -
--max-overhead -5% | bad_value | --max-overhead
--max-overhead nan% | bad_value | --max-overhead
--max-overhead 10% --mem-limit 1GB | excluded_together | --max-overhead
--plot curve.svg | needs_option | --plot
--sweep --plot curve.txt | not_an_image | --plot
--batch big | bad_value | --batch
--batch 8 --batch-multiple 2 | needs_option | --batch-multiple
--grad-accumulation 64 | needs_option | --grad-accumulation
--batch max --max-overhead 10% | excluded_together | --max-overhead
--batch max --fresh-grads --grad-accumulation 64 | excluded_together | --fresh-grads
--batch max --batch-multiple 8 --grad-accumulation 20 | not_divisible | --grad-accumulation
--batch max --pipeline 2 | excluded_together | --batch max
--step-in-backward --forwards-in-flight 2 | excluded_together | --step-in-backward
--step-in-backward --batch max | excluded_together | --step-in-backward
--backward-order reverse | needs_option | --backward-order
--offload tape | unknown_value | --offload
--offload file:/tmp --forwards-in-flight 2 | excluded_together | --forwards-in-flight
--offload file:/tmp --compile | excluded_together | --compile
--offload file:/tmp --device h100 | excluded_together | --offload
--offload host --device h100 --batch max | excluded_together | --batch max
--pipeline 2 --schedule dual | unknown_value | --pipeline
--pipeline 2 --mem-limit 1GB,1GB,1GB | wrong_length | --mem-limit
--pipeline 4 --microbatches 9 --schedule interleaved | not_divisible | --pipeline
--pipeline 2 --virtual-stages 2 | one_part_per_rank | --pipeline
--microbatches 4 | needs_option | --microbatches
--pipeline 2 --verify | excluded_together | --verify
--device h1000 | unknown_device | --device
--device h100:none | not_a_count | --device
--device h100 --precision bfloat16 | needs_option | --precision
--device h100:8 --precision int8 | bad_value | --precision
--device h100 --shard blocks | needs_option | --shard
--device cuda:0 --shard whole | needs_option | --shard
--device h100 --verify | excluded_together | --verify
--autocast bfloat16 | needs_option | --autocast
--device h100 --autocast float32 | bad_value | --autocast
--device-memory 100MB | no_room | --device-memory
--device-file nowhere.toml | FileNotFoundError | --device-file
--optimizer adanw | bad_value | --optimizer
--dtype int8 | bad_value | --dtype
--batch 8 -- | not_for_a_script | --batch
--run --verify | excluded_together | --verify
--run --json - | excluded_together | --json
"""


@pytest.mark.parametrize("case", WRONG_USE.strip().splitlines())
def test_wrong_use_ends_with_2_and_one_sentence_before_the_model_is_loaded(plan, model_file, case):
    arguments, kind, name = case.split(" | ")
    result = plan(model_file("model = sample = None\nraise RuntimeError('loaded')"), *arguments.split())
    ends(result, 2, kind, name=name)
    assert len(result.stderr.strip().splitlines()) == 1


def test_wrong_options_and_missing_models_are_named_and_a_file_without_names_gets_one_that_works(plan, model_file):
    for target, option, word in (
        (model_file(), "--slots=0", "slots"),
        (model_file(), "--mem-limt=1GB", "mem-limit"),
        (model_file(), "--budget=1GB", "'--mem-limit'"),
        ("missing.py:net", "--sweep", "missing.py"),
        ("no_such_module:model", "--sweep", "no_such_module"),
        ("nothing", "--sweep", "nothing"),
        (model_file(f"{HEAD}model = 3\nsample = torch.zeros(1)\n", "three.py"), "--sweep", "'model'"),
        (model_file(f"{HEAD}model = nn.Linear(1, 1)\n", "alone.py"), "--sweep", "'sample'"),
    ):
        result = plan(target, "--mem-limit", "1GB", option)
        assert (result.exit_code, "Traceback" in result.stderr) == (2, False), word
        assert word in result.stderr
        if example := result.stderr.partition("A file that works:")[2]:
            assert plan(model_file(example, "example.py"), "--mem-limit", "1GB").exit_code == 0
    assert example


def test_a_model_that_cannot_be_planned_or_stepped_in_the_backward_ends_with_2(plan, model_file):
    for line, kind in (
        ("class M(nn.Module):\n    def forward(self, x): return x\nmodel = M()", "no_graph"),
        ("model = nn.Sequential(nn.ReLU())", "no_gradient"),
        ("model = nn.Sequential(nn.Linear(4, 4))\ndef loss(y): return y", "loss_not_a_number"),
    ):
        ends(plan(model_file(f"{HEAD}{line}\nsample = torch.zeros(8, 4)\n"), "--mem-limit", "1GB"), 2, kind)
    text = f"{HEAD}model, sample = nn.Linear(4, 4), torch.randn(2, 4)\n"
    for more, kind in (("", "no_optimizer"), ("optimizer = torch.optim.LBFGS\n", "unsupported_optimizer")):
        result = plan(model_file(text + more), "--mem-limit", "1GB", "--step-in-backward")
        ends(result, 2, kind, name="--step-in-backward")


ERRORS = [
    "raise RuntimeError('mine')",
    "def model():\n    raise RuntimeError('mine')",
    "class M(nn.Linear):\n    def forward(self, x):\n        raise RuntimeError('mine')\n"
    "model = nn.Sequential(M(4, 4))",
    "model = nn.Sequential(nn.Linear(4, 4))\ndef loss(y):\n    raise RuntimeError('mine')",
    "model = nn.Sequential(nn.Linear(4, 4))\ndef optimizer(p):\n    raise RuntimeError('mine')",
]


@pytest.mark.parametrize("line", ERRORS)
def test_an_error_of_the_model_ends_with_4_and_its_own_traceback(plan, model_file, line):
    path = model_file(f"{HEAD}sample = torch.zeros(8, 4)\n{line}\n")
    result = plan(path, "--mem-limit", "1GB")
    assert result.exit_code == 4
    assert "RuntimeError: mine" in result.stderr
    assert path in result.stderr
    assert not re.search("rotor_(cli|py|profiling)", result.stderr)


def test_an_interrupt_ends_with_130_and_an_unexpected_error_with_1(plan, model_file, monkeypatch):
    assert plan(model_file(f"{HEAD}raise KeyboardInterrupt\n"), "--mem-limit", "1GB").exit_code == 130
    monkeypatch.setattr("rotor_cli.write_outputs.write_outputs", Mock(side_effect=ZeroDivisionError("inside")))
    result = plan(model_file(), "--mem-limit", "1GB")
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.stderr
    assert "--traceback" in result.stderr, "it says how to see more"
    assert isinstance(plan(model_file(), "--mem-limit", "1GB", "--traceback").exception, ZeroDivisionError)
