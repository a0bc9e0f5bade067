"""Which stages are compiled: those of one kind once, those that can be, and none where that makes the plan worse."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.capture.variants import with_ways
from rotor_py.compile.compiled_stage import same_bits
from rotor_solver import InfeasibleError, Persistent, simulate, store_all
from tests.capture.steps import assert_same_step, in_part
from tests.compile.network import Compilations, Net, batch, loss, measured, network, peak, results, same, stage_by_stage
from tests.fields import logged


@pytest.mark.usefixtures("without_inductor")
def test_stages_of_one_kind_are_compiled_once_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    compilations, told = Compilations(monkeypatch), list[str]()
    found = network(blocks=5, progress=lambda done, total, name: told.append(name))
    assert len(found.names) >= 5
    assert {f"{name}, compiled" for name in found.names} <= set(told)
    assert compilations.count <= 4
    with stage_by_stage():
        found.measure(batch())
    assert compilations.count <= 4


def test_no_plan_is_slower_than_the_plain_one_and_the_error_names_the_least_limit_of_all(compiled) -> None:
    found, plan = compiled, compiled._planner.in_use
    plain = plan.budget_of(plan.ways[-1])
    least, most = plain.least_bytes(), plain.peak_bytes(store_all(plain.chain))
    for limit in (least, (least + most) // 2, most):
        found.compute_sequence(limit)
        assert found.budget.peak_bytes(found.sequence) <= limit
        seconds = simulate(plain.chain, plain.solve(limit, Persistent())).makespan
        assert simulate(found.budget.chain, found.sequence).makespan <= seconds
    with pytest.raises(InfeasibleError) as caught:
        found.compute_sequence(1)
    assert caught.value.min_bytes == min(plan.budget_of(way).least_bytes() for way in plan.ways)


def test_without_a_compiler_one_line_says_so_for_the_whole_model_and_so_does_the_report(monkeypatch, caplog) -> None:
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    asked = []

    def missing(*args: Any, **options: Any) -> Any:
        asked.append(args)
        raise InductorError(InvalidCxxCompiler("c++"), None)

    monkeypatch.setattr("rotor_py.compile.compiled_stage.compile_code", missing)
    found = Checkpointable(Net(), batch(), "1GB", compile=True, loss=loss, fresh_grads=True, granularity=4)
    (record,) = logged(caplog, "not_compiled", name="the model")
    assert "InvalidCxxCompiler" in record.getMessage()
    assert len(asked) == 1
    assert "None of 4 stages runs compiled" in str(found.report())
    plain = Checkpointable(Net(), batch(), "1GB", loss=loss, fresh_grads=True, granularity=4)
    assert "compiled" not in str(plain.report())


def test_a_stage_that_cannot_be_compiled_runs_as_it_is(monkeypatch, caplog) -> None:
    Compilations(monkeypatch, failing=range(100))
    found = Checkpointable(Net(), batch(), "1GB", compile=True, loss=loss, fresh_grads=True, granularity=4)
    assert found.compiled == []
    names = [record.__dict__["subject"] for record in logged(caplog, "not_compiled")]
    assert names[0] == "the graph as a whole"
    assert 1 < len(names) <= 5  # one for each kind
    assert any(name in names[1] for name in found.names)
    assert_same_step(found, copy.deepcopy(found.model), batch(), loss=loss)


@pytest.mark.slow
def test_ways_keep_less_with_the_same_bits_and_the_predicted_peak_also_from_a_file(tmp_path) -> None:
    budgeted = network(blocks=6, budgets=True)
    measurement = budgeted._planner.in_use.measurement
    others = [stage for stage, names in enumerate(measurement.way_names) if names]
    assert len(others) > 1, "no stage has another way"
    sequence = in_part(budgeted, others[0] + 1)
    for cost, ways in zip(measurement.stages, measurement.ways_by_stage, strict=True):
        saved = [cost.saved_bytes, *(way.cost.saved_bytes for way in ways)]
        assert saved == sorted(set(saved), reverse=True)
    expected = results(budgeted, store_all(budgeted.chain), batch())
    assert same(results(budgeted, sequence, batch()), expected)
    budgeted.save_plan(tmp_path / "plan.json")
    torch.manual_seed(0)
    again = Checkpointable(Net(6), plan=tmp_path / "plan.json", granularity=6)
    again.model.load_state_dict(budgeted.model.state_dict())
    assert same(results(again, sequence, batch()), expected)
    assert 0.98 * peak(budgeted) <= measured(budgeted, batch()) <= peak(budgeted)


@pytest.mark.parametrize("where", ["nowhere", "output", "gradient", "random"])
def test_a_way_is_taken_only_if_all_its_numbers_are_the_usual_ones(where: str) -> None:
    def other(stage: nn.Module, value: torch.Tensor) -> torch.Tensor:
        if where == "random":
            torch.rand(())
        made = stage(value)
        if where == "gradient":
            made = made + 1e-6 * (made - made.detach())
        return made + 1e-6 * made.detach() if where == "output" else made

    stage = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.3))
    before = {name: each.clone() for name, each in stage.state_dict().items()}
    codes: Any = [SimpleNamespace(run=run) for run in (lambda stage, value: stage(value), other)]
    assert same_bits(stage, torch.randn(16, 8), [True], *codes) == (where == "nowhere")
    assert same(stage.state_dict().values(), before.values())
    assert all(each.grad is None for each in stage.parameters())


def test_ways_are_compiled_in_the_time_that_equal_stages_have_saved() -> None:
    stages: list[Any] = [
        SimpleNamespace(code=code, with_ways=lambda ways, code=code: SimpleNamespace(code=code, ways=ways))
        for code in ["one"] * 4 + ["other"] * 3
    ]
    compiler: Any = SimpleNamespace(seconds_of={"one": 5.0, "other": 10.0})
    made: list[Any] = with_ways(stages, compiler)
    assert {each.code: len(each.ways) for each in made} == {"one": 3, "other": 2}
