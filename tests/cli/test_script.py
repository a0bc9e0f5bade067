"""`rotor-plan train.py -- arguments`: a training script is run up to its first step, and that step is planned."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result
from torch import nn

from rotor_cli.model_file_errors import defines
from rotor_cli.plan_command import main_module, run_script
from rotor_py import parse_bytes
from tests.fields import check, ends

pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*", "ignore:.*pin_memory")

NETWORK = """
import sys
import torch
from torch import nn

class Noted(list): ...  # measuring and recomputations restore no lists of other classes

class Counted(nn.Linear):
    calls = Noted()
    def forward(self, x):
        Counted.calls.append(1)
        return super().forward(x)

torch.manual_seed(0)
net = nn.Sequential(*(nn.Sequential(Counted(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)), nn.Linear(16, 4))
batches = [(torch.randn(64, 16), torch.randint(4, (64,))) for _ in range(3)]
criterion = nn.CrossEntropyLoss()
"""
LOOP = f"""{NETWORK}
optimizer = torch.optim.AdamW(net.parameters())
for x, y in batches:
    optimizer.zero_grad()
    loss = criterion(net(x), y)
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
print("calls", len(Counted.calls))
"""
REAL = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from blocks import Block  # its neighbour

class Net(nn.Sequential):
    def forward(self, x, scale=1.0): return super().forward(scale * x)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, required=True)
    width = parser.parse_args().width
    data = TensorDataset(torch.randn(96, width), torch.randint(4, (96,)))
    net = Net(*(Block(width) for _ in range(3)), nn.Linear(width, 4))
    net(data[:2][0])  # to try it out: no step
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for x, y in DataLoader(data, batch_size=32, num_workers=1):
        loss = nn.functional.cross_entropy(net(x, scale=0.5), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        open("trained", "w").close()
"""
BLOCK = """
from torch import nn
class Block(nn.Sequential):
    def __init__(self, width):
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
"""

Script = Callable[..., Result]


@pytest.fixture
def script(plan, model_file, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Write a script, and run the command with it and a generous limit unless another one is given."""
    monkeypatch.chdir(tmp_path)

    def run(text: str, *arguments: object, limit: object = "1GB") -> Result:
        return plan(model_file(text, "train.py"), "--mem-limit", limit, *arguments)

    return run


def found_by(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_script_with_arguments_workers_and_a_neighbour_is_planned_before_it_trains(script, model_file, tmp_path):
    model_file(BLOCK, "blocks.py")
    before = sys.argv, list(sys.path), sys.modules["__main__"], nn.Module.__call__
    data = found_by(script(REAL, "--verify", "--json", "-", "--", "--width", 16))
    assert (sys.argv, sys.path, sys.modules["__main__"], nn.Module.__call__) == before
    found = data["taken"]
    assert (found["model"], found["optimizer"], found["own_loss"]) == ("Net", "SGD", False)
    assert found["input"].startswith("[32, 16] float32")
    assert found["arguments"] == ["--width", "16"]
    assert found["trained"] == 3 * (16 * 64 + 64 + 64 * 16 + 16) + 16 * 4 + 4
    assert not (tmp_path / "trained").exists()
    assert data["plan"]["forwards_in_flight"] == 1  # the one that was tried out is gone
    assert data["verify"]["max_grad_difference"] == 0
    assert data["verify"]["measured_peak_bytes"] == pytest.approx(data["plan"]["peak_bytes"], rel=0.02)
    sys.modules.pop("blocks")


def test_with_run_the_script_goes_on_by_the_plan_with_its_own_numbers(script, tmp_path, capsys):
    (tmp_path / "plain.py").write_text(LOOP)
    with main_module(str(tmp_path / "plain.py"), ()) as module:
        run_script(module)
    plain = capsys.readouterr().out.splitlines()
    refused = script(LOOP, "--", limit="110kB")
    assert (refused.exit_code, "stage" in refused.stderr) == (3, True)
    least = parse_bytes(refused.stderr.split("a limit of ")[-1].strip(" .\n"))
    result = script(LOOP, "--run", limit=least)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("train.py fits in")
    assert "train.py --mem-limit" in " ".join(result.stdout.split())  # lines break where the path is long
    assert [line for line in lines if line.startswith("loss")] == plain[:-1]
    measured = int(script(LOOP, "--run").stdout.splitlines()[-1].split()[1])  # what measuring takes is in both
    assert int(lines[-1].split()[1]) > measured


def test_what_cannot_fit_is_said_before_the_model_of_a_script_runs(script):
    step = "try:\n    net(batches[0][0])\nexcept Exception:\n    sys.exit(1)\n"
    refused = script(f"{NETWORK}\n{step}\nfinally:\n    print('calls', len(Counted.calls))\n", "--", limit="10kB")
    assert refused.exit_code == 3, refused.output
    assert "before measuring: a training step needs at least" in " ".join(refused.stderr.split())
    assert "calls 0" in refused.stderr


def test_without_arguments_a_file_is_a_script_if_it_is_no_model_file_and_only_scripts_take_any(script, plan):
    ends(plan("torch.nn:Linear", "--mem-limit", "1GB", "--", "--epochs", "3"), 2, "not_a_script")
    text = LOOP.replace("net", "model")  # a model, but no sample
    assert "Taken from the first training step of train.py" in script(text).stdout
    assert "Taken" not in script(f"{text}\nsample = batches[0][0]\n").stdout


STEPS = """
# an optimizer that steps in the backward: {"model": "Sequential", "optimizer": null}
optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}
def step(p):
    optimizers[p].step()
    p.grad = None
for p in net.parameters(): p.register_post_accumulate_grad_hook(step)
for x, y in batches: criterion(net(x), y).backward()
# no optimizer of torch: {"optimizer": null}
for p, g in zip(net.parameters(), torch.autograd.grad(net(batches[0][0]).sum(), list(net.parameters()))):
    p.data -= g
# autocast and a scaler: {"optimizer": "SGD", "own_loss": false}
optimizer, scaler = torch.optim.SGD(net.parameters()), torch.amp.GradScaler('cpu')
for x, y in batches:
    with torch.autocast('cpu', torch.bfloat16): loss = criterion(net(x), y)
    scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()
# gradients over several batches: {"optimizer": "SGD"}
optimizer = torch.optim.SGD(net.parameters())
for x, y in batches: criterion(net(x), y).backward()
optimizer.step()
# a model that is called twice: {"optimizer": "SGD"}
optimizer = torch.optim.SGD(net.parameters())
(net(batches[0][0]) - net(batches[1][0])).square().mean().backward()
optimizer.step()
# an optimizer that is made late: {"optimizer": "Adam"}
loss = criterion(net(batches[0][0]), batches[0][1])
optimizer = torch.optim.Adam(net.parameters())
loss.backward(); optimizer.step()
# a larger model that is not trained: {"trained": 6452, "others": []}
teacher, optimizer = nn.Linear(16, 9999), torch.optim.SGD(net.parameters())
for x, y in batches: (net(x) - teacher(x)[:, :4].detach()).square().mean().backward(); optimizer.step()
# a model that returns its loss: {"optimizer": "SGD", "own_loss": true}
class Mean(nn.Module):
    def forward(self, x): return x.square().mean()
model = nn.Sequential(*net, Mean())
optimizer = torch.optim.SGD(model.parameters())
for x, y in batches: model(x).backward(); optimizer.step()
# an error that the script handles: {"optimizer": "SGD"}
optimizer = torch.optim.SGD(net.parameters())
try:
    criterion(net(batches[0][0]), batches[0][1]).backward(); optimizer.step()
except Exception: raise SystemExit(1)
"""


@pytest.mark.parametrize("step", STEPS.split("\n# ")[1:], ids=lambda step: step.partition(":")[0])
def test_what_a_step_shows_is_what_is_planned(step, script):
    head, _, text = step.partition("\n")
    name, _, expected = head.partition(": ")
    result = script(f"{NETWORK}{text}\n", "--verify", "--json", "report.json", "--")
    assert result.exit_code == 0, result.output
    data = json.loads(Path("report.json").read_text())
    assert {**data["taken"], **json.loads(expected)} == data["taken"]
    assert data["verify"]["max_grad_difference"] == 0
    assert data["plan"]["forwards_in_flight"] == (2 if "twice" in name else 1)
    assert ("fresh_grads=True" in result.stdout) == ("several batches" not in name)


def test_a_loss_outside_of_the_model_counts_and_of_several_models_the_largest_is_planned_as_the_report_says(script):
    text = f"{NETWORK}optimizer = torch.optim.SGD(net.parameters())\nout = net(batches[0][0])\n"
    small, large = (
        found_by(script(f"{text}{loss}.backward()\noptimizer.step()\n", "--json", "-", "--"))
        for loss in ("out.mean()", "(out.repeat(1, 200).exp() * 2).sum()")
    )
    assert large["min_bytes"] > small["min_bytes"]
    text = " ".join(script(GAN).stdout.split())
    assert "Generator, which trains" in text
    assert "on [32, 8]" in text
    assert "trains Discriminator as well, which is smaller" in text


GAN = """
import torch
from torch import nn
class Generator(nn.Sequential): pass
class Discriminator(nn.Sequential): pass
d = Discriminator(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
g = Generator(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 16))
of_d, of_g = torch.optim.Adam(d.parameters()), torch.optim.Adam(g.parameters())
for _ in range(3):
    of_d.zero_grad()
    d(torch.randn(64, 16)).square().mean().backward()
    fake = g(torch.randn(32, 8))
    d(fake.detach()).square().mean().backward()
    of_d.step()
    of_g.zero_grad()
    d(fake).square().mean().backward()
    of_g.step()
"""


def test_a_script_that_catches_everything_trains_nothing_all_the_same(script):
    guarded = """
optimizer, before = torch.optim.SGD(net.parameters(), lr=1.0), net[0][0].weight.clone()
for x, y in batches:
    try:
        criterion(net(x), y).backward()
        optimizer.step()
    except:
        pass
print("the same" if torch.equal(before, net[0][0].weight) else "trained")
"""
    result = script(f"{NETWORK}{guarded}", "--")
    assert "Taken from the first training step" in result.stdout
    assert "the same" in result.stderr
    assert script(f"{NETWORK}{guarded.replace('pass', 'sys.exit(1)')}", "--").exit_code == 0
    refused = script(f"{NETWORK}{guarded}", "--run", limit="10kB")
    assert (refused.exit_code, "the same" in refused.stdout) == (3, True)


def test_a_step_stays_inside_the_limit_while_the_script_runs(script):
    measured = """
from rotor_profiling import measured_peak
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
def step():
    criterion(net(batches[0][0]), batches[0][1]).backward()
    optimizer.step()
    optimizer.zero_grad()
step()
step()
print("peak", measured_peak(step, [*net.parameters(), *batches[0]], torch.device("cpu")))
"""
    text = f"{NETWORK}{measured}"
    data = found_by(script(text, "--json", "-", "--"))
    limit = (data["min_bytes"] + data["store_all"]["peak_bytes"]) // 2
    peaks = [int(script(text, "--run", limit=most).stdout.splitlines()[-1].split()[1]) for most in ("1GB", limit)]
    assert peaks[1] <= limit < peaks[0]


LIGHTNING = """
import torch
import lightning
from torch import nn
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters())

loader = torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=16)
trainer = lightning.Trainer(max_steps=2, accelerator="cpu", logger=False, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Module(), loader)
"""


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_loop_of_a_trainer_is_planned(script):
    pytest.importorskip("lightning")
    found = found_by(script(LIGHTNING, "--json", "-", "--"))["taken"]
    assert (found["model"], found["optimizer"], found["own_loss"]) == ("Sequential", "Adam", False)
    assert found["input"].startswith("[16, 8]")


@pytest.mark.parametrize(
    ("text", "code", "kind"),
    [
        ("print('no more')", 2, "no_training_step"),
        (f"{NETWORK}net(batches[0][0])", 2, "no_training_step"),
        ("import sys; sys.exit(3)", 4, "script_exited"),
        ("raise KeyError('mine')", 4, "script_raised"),
        (LOOP.replace("super().forward(x)", "super().forward(x[:, :3])"), 4, "script_raised"),
        (LOOP.replace("net = nn.Seq", "from rotor_py import Checkpointable\nnet = Checkpointable(nn.Seq").replace(
            "nn.Linear(16, 4))", "nn.Linear(16, 4)))"), 2, "planned_already"),
        ("raise KeyboardInterrupt", 130, None),
        ("def broken(:", 4, "script_raised"),
    ],
)  # fmt: skip
def test_a_script_that_cannot_be_planned_ends_with_one_message(script, text, code, kind):
    result = script(text, "--")
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    if kind is not None:
        check(result.failure, kind)
    for own in ("rotor_cli", "rotor_py/", "rotor_profiling"):
        assert own not in result.stderr


def test_with_run_the_script_ends_as_it_ends_by_itself(script):
    assert script(f"{LOOP}\nsys.exit(7)\n", "--run").exit_code == 7
    failed = script(f"{LOOP}\nraise KeyError('mine')\n", "--run")
    assert failed.exit_code == 4
    assert "KeyError: 'mine'" in failed.stderr
    grown = f"{LOOP}\nnet(torch.randn(6400, 16)).sum().backward()\n"
    assert script(grown, "--run", limit="2MB").exit_code == 3


@pytest.mark.parametrize(
    ("text", "defined"),
    [
        ("try:\n    model = 1\nexcept E:\n    pass\nfor sample in x: pass", True),
        ("from models import *", True),
        ("globals()['model'] = 1", True),
        ("broken(", True),
        ("def main():\n    model = sample = 1", False),
        ("match x:\n    case {'a': (3 as model), **sample}: pass", True),
        ("if __name__ == '__main__' or x:\n    model = sample = 1", True),
        ("locals()['model'] = 1", True),
        ("import sys\nsys.modules[__name__].model = 1", True),
        ("[sample for model in x]\nsample.model = 1", False),
    ],
)
def test_what_a_file_defines_is_told_from_its_text(text, defined, tmp_path):
    (tmp_path / "file.py").write_text(text)
    assert defines(str(tmp_path / "file.py"), ("model", "sample")) == defined


def test_both_ways_to_go_on_have_the_limit_as_people_read_it_and_options(script):
    least = json.loads(script(LOOP, "--json", "-").stdout)["min_bytes"]
    for limit in (least, 10**9):  # exactly, and with few digits
        lines = script(LOOP, "--keep", "bf16", limit=limit).stdout
        python = lines.partition("mem_limit=")[2].split(",")[0].strip(') \n"')
        command = lines.partition("--mem-limit ")[2].split()[0]
        assert command == python
        assert parse_bytes(command) == limit
        assert not re.search(r"\d{7}", command)
        assert 'keep="bf16"' in lines
        assert "--keep=bf16" in lines
