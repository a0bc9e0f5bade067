"""Which stages are compiled: those of one kind once, those that can be, and none where that makes the plan worse."""

from typing import Any

import pytest
import torch

from rotor_py import Checkpointable
from rotor_solver import InfeasibleError, Persistent, simulate, store_all
from tests.compile.network import Compilations, Net, batch, gradients, loss, network, same, stage_by_stage
from tests.fields import logged


def test_stages_of_one_kind_are_compiled_once_and_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    compilations, told = Compilations(monkeypatch), list[str]()
    found = network(blocks=6, progress=lambda done, total, name: told.append(name))
    assert len(found.names) >= 6
    assert {f"{name}, compiled" for name in found.names} <= set(told)
    assert compilations.count <= 4
    with stage_by_stage():
        found.measure(batch())
    assert compilations.count <= 4


def test_no_plan_is_slower_than_the_plain_one_and_the_error_names_the_least_limit_of_all(
    compiled: Checkpointable,
) -> None:
    found, plan = compiled, compiled._planner.in_use
    plain = plan.budget_of(plan.ways[-1])
    least, most = plain.least_bytes(), plain.peak_bytes(store_all(plain.chain))
    for limit in (least, (least + most) // 2, most):
        found.compute_sequence(limit)
        assert found.budget is not None
        assert found.sequence is not None
        assert found.budget.peak_bytes(found.sequence) <= limit
        seconds = simulate(plain.chain, plain.solve(limit, Persistent())).makespan
        assert simulate(found.budget.chain, found.sequence).makespan <= seconds
    with pytest.raises(InfeasibleError) as caught:
        found.compute_sequence(1)
    assert caught.value.min_bytes == min(plan.budget_of(way).least_bytes() for way in plan.ways)


def test_without_a_compiler_one_line_says_so_for_the_whole_model_and_so_does_the_report(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from torch._inductor.exc import InductorError, InvalidCxxCompiler

    asked = []

    def missing(*args: Any, **options: Any) -> Any:
        asked.append(args)
        raise InductorError(InvalidCxxCompiler("c++"), None)

    monkeypatch.setattr("rotor_py.compile.compiled_stage.compile_code", missing)
    torch.manual_seed(0)
    found = Checkpointable(Net(), batch(), "1GB", compile=True, loss=loss, fresh_grads=True, granularity=4)
    (record,) = logged(caplog, "not_compiled", name="the model")
    assert "InvalidCxxCompiler" in record.getMessage()
    assert len(asked) == 1
    assert "None of 4 stages runs compiled" in str(found.report())
    plain = Checkpointable(Net(), batch(), "1GB", loss=loss, fresh_grads=True, granularity=4)
    assert "compiled" not in str(plain.report())


def test_a_stage_that_cannot_be_compiled_runs_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Compilations(monkeypatch, failing=range(100))
    torch.manual_seed(0)
    found = Checkpointable(Net(), batch(), "1GB", compile=True, loss=loss, fresh_grads=True, granularity=4)
    assert found.compiled == []
    names = [record.__dict__["subject"] for record in logged(caplog, "not_compiled")]
    assert names[0] == "the graph as a whole"
    assert 1 < len(names) <= 5  # one for each kind
    assert any(name in names[1] for name in found.names)

    def step(model: torch.nn.Module) -> list[torch.Tensor]:
        found.model.zero_grad()
        torch.manual_seed(1)
        loss(model(batch())).backward()
        return gradients(found.model)

    made = step(found)
    assert same(made, step(found.model))


def test_the_others_are_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    Compilations(monkeypatch, failing=range(1))
    found = network(blocks=2)
    assert 0 < len(found.compiled) < len(found.names)
