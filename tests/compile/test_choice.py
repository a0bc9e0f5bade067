"""Which stages are compiled: those of one kind once, those that can be, and none where that makes the plan worse."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rotor_py import Checkpointable
from rotor_py.capture.whole_graph import slower
from rotor_py.compile import compiled_stage
from rotor_py.compile.stage_code import NotCompilableError
from rotor_solver import InfeasibleError, Persistent, simulate, store_all
from tests.compile.network import Net, batch, gradients, loss, network, same, stage_by_stage
from tests.fields import logged, raises


class Compilations:
    """Counts what is compiled, and lets it fail for the stages whose number is in `failing`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: range = range(0)) -> None:
        self.count = 0
        self._failing = failing
        self._compile = compiled_stage.compile_code
        monkeypatch.setattr(compiled_stage, "compile_code", self)

    def __call__(self, *arguments: Any) -> Any:
        self.count += 1
        if self.count - 1 in self._failing:
            raise NotCompilableError("this machine has no compiler\nand more about that")
        return self._compile(*arguments)


def test_stages_of_one_kind_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compilations = Compilations(monkeypatch)
    found = network(blocks=8)
    assert len(found.names) >= 8
    assert compilations.count <= 4
    with stage_by_stage():
        found.measure(batch())
    assert compilations.count <= 4


def test_what_is_compiled_is_told() -> None:
    told: list[str] = []
    with stage_by_stage():
        found = Checkpointable(
            Net(), batch(), compile=True, granularity=4, progress=lambda done, total, name: told.append(name)
        )
    assert {f"{name}, compiled" for name in found.names} <= set(told)


def test_no_plan_is_slower_than_the_plain_one() -> None:
    found = network()
    ways = found._planner.in_use.ways
    plain = found._planner.in_use.budget_of(ways[-1])
    least, most = plain.least_bytes(), plain.peak_bytes(store_all(plain.chain))
    for limit in (least, (least + most) // 2, most):
        found.compute_sequence(limit)
        assert found.budget is not None
        assert found.sequence is not None
        assert found.budget.peak_bytes(found.sequence) <= limit
        seconds = simulate(plain.chain, plain.solve(limit, Persistent())).makespan
        assert simulate(found.budget.chain, found.sequence).makespan <= seconds


@pytest.mark.slow
def test_without_a_limit_it_is_the_way_that_is_fastest_with_everything_stored() -> None:
    found = Checkpointable(Net(), compile=True, loss=loss, fresh_grads=True, granularity=4)
    found.measure(batch())
    plan = found._planner.in_use
    seconds = [simulate(each.chain, store_all(each.chain)).makespan for each in map(plan.budget_of, plan.ways)]
    assert plan.cut is plan.ways[seconds.index(min(seconds))].cut


def test_where_no_way_fits_the_error_names_the_least_limit_of_all() -> None:
    found = network()
    plan = found._planner.in_use
    with pytest.raises(InfeasibleError) as caught:
        found.compute_sequence(1)
    assert caught.value.min_bytes == min(plan.budget_of(way).least_bytes() for way in plan.ways)


@pytest.mark.parametrize(
    ("compiled", "plain", "expected"),
    [
        ((9.0, 1.0, 9.0, 9.0), (1.1, 1.1, 1.1, 1.1), False),  # a busy machine has disturbed three of its runs
        ((1.01, 1.0, 1.01, 1.0), (1.0, 0.99, 1.0, 1.0), False),  # no slower than times are known
        ((1.1, *[9.0] * 11), (1.0, *[9.0] * 11), True),
        ((1.1, 1.1, 1.1, 1.1, *[1.1] * 7, 1.0), (1.0,) * 12, False),  # disturbed in all of the first turns
    ],
)
def test_compiled_code_is_slower_only_if_it_is_at_its_best_and_clearly(
    compiled: tuple[float, ...], plain: tuple[float, ...], expected: bool
) -> None:
    order: list[str] = []

    def timed(name: str, seconds: tuple[float, ...]) -> Any:
        remaining = iter(seconds)

        def time_again() -> float:
            order.append(name)
            return next(remaining)

        return SimpleNamespace(stages=SimpleNamespace(time_again=time_again))

    assert slower(timed("compiled", compiled), timed("plain", plain)) == expected
    assert order == ["compiled", "plain"] * len(compiled)  # in turns


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
    found = network()
    assert 0 < len(found.compiled) < len(found.names)


@pytest.mark.parametrize(
    ("compile", "error", "kind"),
    [
        ("reduce-overhead", ValueError, "cuda_graphs"),
        ({"triton.cudagraphs": True}, ValueError, "cuda_graphs"),
        ("fastest", ValueError, "unknown_value"),
        ({"no_such_option": 1}, ValueError, "unknown_value"),
        (3, TypeError, "unknown_value"),
    ],
)
def test_what_cannot_be_compiled_by_is_refused(compile: Any, error: type[Exception], kind: str) -> None:
    with raises(error, kind):
        Checkpointable(Net(1), compile=compile)


def test_modes_and_options_are_those_of_torch_compile() -> None:
    def inductor(compile: Any) -> dict[str, Any] | None:
        found = Checkpointable(Net(1), compile=compile)._planner.settings.inductor
        return None if found is None else dict(found)

    assert inductor(False) is None
    assert inductor(True) == {}
    assert inductor("default") == {}
    assert inductor({"fallback_random": True}) == {"fallback_random": True}
    assert inductor("max-autotune-no-cudagraphs") == {"max_autotune": True, "coordinate_descent_tuning": True}
