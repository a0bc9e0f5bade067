"""The ways to ask for compiled stages: `.compile()`, the backend, and the command; torch.compile around is none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._inductor import config as inductor_config

from rotor_py import Checkpointable
from rotor_py.backend import rotor
from rotor_py.capture import variants
from tests.compile.network import Net, Wide, batch, gradients, loss, stage_by_stage
from tests.fields import invoke, logged, raises


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many kinds of stages were compiled, each time that a graph was measured."""
    found: list[int] = []
    compiled = variants.compiled_variants

    def watched(plain: Any, compiler: Any, *rest: Any, **options: Any) -> Any:
        result = compiled(plain, compiler, *rest, **options)
        found.append(len(compiler.seconds_of))
        return result

    monkeypatch.setattr("rotor_py.capture.measure_graphs.compiled_variants", watched)
    monkeypatch.setattr("rotor_py.backend.compiled_variants", watched)
    return found


def planned() -> Checkpointable:
    torch.manual_seed(0)
    return Checkpointable(Net(), mem_limit="1GB", loss=loss, fresh_grads=True, granularity=4)


@pytest.mark.usefixtures("without_inductor")
def test_compile_has_a_measured_model_planned_anew_with_compiled_stages(seen: list[int]) -> None:
    found = Checkpointable(Wide(3), mem_limit="1GB", loss=loss, fresh_grads=True, granularity=3)
    found.measure(batch())  # plain: nothing has been said of compiling
    found.compile(options={"fallback_random": True})
    with stage_by_stage():
        loss(found(batch())).backward()
    assert len(seen) == 1
    assert seen[0] > 0
    assert found._planner.settings.inductor == (("fallback_random", True),)
    loss(found(batch())).backward()
    assert len(seen) == 1


def test_modes_and_options_are_those_of_torch_compile_but_another_backend_and_cuda_graphs_are_refused(caplog) -> None:
    tuned = ("coordinate_descent_tuning", True), ("max_autotune", True)
    given: Any
    for given, inductor in (
        (False, None),
        (True, ()),
        ({"fallback_random": True}, (("fallback_random", True),)),
        ("max-autotune-no-cudagraphs", tuned),
    ):
        assert Checkpointable(Net(1), compile=given)._planner.settings.inductor == inductor
    for given in ("fastest", {"no_such_option": 1}, 3):
        with raises((ValueError, TypeError), "unknown_value"):
            Checkpointable(Net(1), compile=given)
    found = planned()
    found.compile(mode="max-autotune-no-cudagraphs", dynamic=True)
    assert found._planner.settings.inductor == tuned
    assert logged(caplog, "compile_ignored", name="dynamic")
    with raises(ValueError, "excluded_together", name="options"):
        found.compile(mode="default", options={"epilogue_fusion": False})
    with raises(ValueError, "excluded_together", name="backend"):
        found.compile(backend="aot_eager")
    with pytest.raises(TypeError):
        found.compile(modus="default")
    for asked in ({"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"triton.cudagraphs": True}}):
        with raises(ValueError, "cuda_graphs"):
            planned().compile(**asked)
        with raises(ValueError, "cuda_graphs"):
            Checkpointable(Net(1), compile=next(iter(asked.values())))
    with raises(ValueError, "cuda_graphs"):
        rotor(fx.GraphModule(nn.Module(), fx.Graph()), [], options={"compile": "reduce-overhead"})
    with inductor_config.patch({"triton.cudagraphs": True}):
        name = "torch._inductor.config.triton.cudagraphs (TORCHINDUCTOR_CUDAGRAPHS)"
        with raises(ValueError, "cuda_graphs", name=name):
            Checkpointable(Net(1), compile=True)
        Checkpointable(Net(1), compile={"triton.cudagraphs": False})
    for mode, words in (("reduce-overhead", "without CUDA graphs"), ("default", "takes no mode")):
        result = invoke("net.py", "--compile", mode)
        assert (result.exit_code, words in result.stderr) == (2, True)


def test_torch_compile_around_the_model_and_plans_from_files_compile_nothing_and_say_so(seen, caplog, tmp_path) -> None:
    found = Checkpointable(Wide(3), mem_limit="1GB", loss=loss, granularity=3)
    around = torch.compile(found, mode="reduce-overhead")
    for _ in range(2):
        loss(around(batch())).backward()
    assert seen == []
    assert len(logged(caplog, "compile_ignored", name="torch.compile")) == 1
    made = gradients(found)
    found.zero_grad()
    for _ in range(2):
        loss(found.model(batch())).backward()
    assert all(map(torch.equal, made, gradients(found)))
    # Nor does a plan from a file.
    found.save_plan(tmp_path / "plan.json")
    followed = Checkpointable(Wide(3), plan=tmp_path / "plan.json", granularity=3)
    followed.compile()
    loss(followed(batch())).backward()
    assert seen == []
    assert len(logged(caplog, "compile_ignored", name="plan")) == 1


def test_the_backend_compiles_if_it_is_told_to(seen: list[int]) -> None:
    model = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(value: torch.Tensor) -> torch.Tensor:
        for layer in model:
            value = torch.tanh(layer(value))
        return value

    options = {"mem_limit": "1GB", "granularity": 3, "compile": True}
    loss(torch.compile(forward, backend="rotor", options=options)(batch())).backward()
    assert seen[0] > 0
    made = gradients(model)
    model.zero_grad()
    loss(forward(batch())).backward()
    torch.testing.assert_close(made, gradients(model))


MODEL = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3)))

sample = torch.randn(64, 32)
"""


@pytest.mark.slow
def test_the_command_captures_a_chain_to_compile_verifies_and_saves_it(tmp_path: Path, seen: list[int]) -> None:
    file = tmp_path / "net.py"
    file.write_text(MODEL, encoding="utf-8")
    options = ["--mem-limit", "1GB", "--compile", "--verify", "--json", "-", "--save", str(tmp_path / "plan.json")]
    result = invoke(file, *options)
    assert result.exit_code == 0, result.output
    assert seen[0] > 0
    report = json.loads(result.stdout)
    if "compiled" in report["plan"]:
        assert report["verify"]["max_grad_difference"] == 0
    assert json.loads((tmp_path / "plan.json").read_text())["compiled"]["options"] == {}
