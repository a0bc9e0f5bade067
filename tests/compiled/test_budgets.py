"""Other ways to store a compiled stage: which are compiled, that they have the same bits, and that bytes are known."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import LossCost, StageCost, measured_peak
from rotor_py import Checkpointable
from rotor_py.capture.variants import may_have_ways, with_ways
from rotor_py.compile.compiled_stage import same_bits
from rotor_py.compile.stage_code import BUDGETS, Foreseen, way_of
from rotor_py.measure.measurement import Measurement
from rotor_solver import Backward, ForwardCheck, ForwardEnable, Loss, Sequence, store_all
from tests.compiled.network import Net, batch, loss, network, results, same

CPU = torch.device("cpu")
HALF, LESS, LEAST = map(way_of, BUDGETS)


@pytest.fixture(scope="module")
def budgeted() -> Checkpointable:
    """A network with dropout and batch norms, some of whose compiled stages can be stored in other ways."""
    return network(blocks=6, budgets=True)


def in_ways(found: Checkpointable) -> Sequence:
    """Every stage is stored in the last of its ways, and those up to the middle are run again for that."""
    measurement = found._planner.in_use.measurement
    options = [len(names) for names in measurement.way_names]
    assert sum(map(bool, options)) > 1, "no stage has another way"
    middle = next(stage for stage, option in enumerate(options) if option) + 1
    operations: list[Any] = [ForwardCheck(stage) for stage in range(middle)]
    operations += [ForwardEnable(stage, options[stage]) for stage in range(middle, len(options))]
    operations.append(Loss())
    operations += [Backward(stage) for stage in reversed(range(middle, len(options)))]
    for stage in reversed(range(middle)):
        operations += [ForwardEnable(stage, options[stage]), Backward(stage)]
    return Sequence(operations)


def test_a_step_has_the_bits_of_the_compiled_step_that_stores_all(budgeted: Checkpointable) -> None:
    assert budgeted.chain is not None
    expected = results(budgeted, store_all(budgeted.chain), batch())
    assert same(results(budgeted, in_ways(budgeted), batch()), expected)


def test_ways_keep_less_and_their_peak_is_the_predicted_one(budgeted: Checkpointable) -> None:
    model, value = budgeted.model, batch()
    budgeted.watch = False
    measurement = budgeted._planner.in_use.measurement
    for cost, ways in zip(measurement.stages, measurement.ways_by_stage, strict=True):
        saved = [cost.saved_bytes, *(way.cost.saved_bytes for way in ways)]
        assert saved == sorted(set(saved), reverse=True)

    def step() -> None:
        output = budgeted(value)
        loss(output).backward()

    assert budgeted.budget is not None
    budgeted.sequence = in_ways(budgeted)
    model.zero_grad()
    step()
    model.zero_grad()
    peak = measured_peak(step, [*model.parameters(), *model.buffers(), value], CPU)
    predicted = budgeted.budget.peak_bytes(budgeted.sequence)
    assert 0.98 * predicted <= peak <= predicted


def test_what_a_way_saves_is_known_before_it_is_compiled(budgeted: Checkpointable) -> None:
    plan = budgeted._planner.in_use
    assert plan.cut is not None
    compared = 0
    for (_, function), ways in zip(plan.cut.stages, plan.measurement.ways_by_stage, strict=True):
        stage: Any = function
        for foreseen in stage.foreseen:
            for way in ways:
                if way.name == foreseen.way:
                    beside_output = way.cost.saved_bytes - way.cost.activation_bytes
                    assert abs(foreseen.bytes - beside_output) <= 0.01 * beside_output
                    compared += 1
    assert compared


def test_a_plan_from_a_file_has_the_same_numbers(budgeted: Checkpointable, tmp_path: Path) -> None:
    budgeted.sequence = in_ways(budgeted)
    budgeted.save_plan(tmp_path / "plan.json")
    torch.manual_seed(0)
    again = Checkpointable(Net(6), plan=tmp_path / "plan.json", granularity=6)
    again.model.load_state_dict(budgeted.model.state_dict())
    assert same(results(again, budgeted.sequence, batch()), results(budgeted, budgeted.sequence, batch()))


class Code:
    """What runs a stage, with an error in its output, its gradients or its random numbers."""

    def __init__(self, where: str = "nowhere") -> None:
        self._where = where

    def run(self, stage: nn.Module, value: torch.Tensor) -> torch.Tensor:
        if self._where == "random":
            torch.rand(())
        made: torch.Tensor = stage(value)
        off = made.detach() * 1e-6
        if self._where == "gradient":
            made = made + 1e-6 * (made - made.detach())
        return made + off if self._where == "output" else made


@pytest.mark.parametrize("where", ["nowhere", "output", "gradient", "random"])
def test_a_way_is_taken_only_if_all_its_numbers_are_the_usual_ones(where: str) -> None:
    torch.manual_seed(0)
    stage = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.3))
    before = {name: each.clone() for name, each in stage.state_dict().items()}
    usual: Any = Code()
    other: Any = Code(where)
    assert same_bits(stage, torch.randn(16, 8), [True], usual, other) == (where == "nowhere")
    assert same(stage.state_dict().values(), before.values())
    assert all(each.grad is None for each in stage.parameters())


def surveyed(code: str) -> Any:
    """A stage whose code saves 100 bytes; its ways half of them for little time, or fewer for more."""
    foreseen = (
        Foreseen(HALF, 50, 100, 0, 1.02),
        Foreseen(LESS, 98, 100, 0, 1.01),
        Foreseen(LEAST, 40, 100, 100, 9.0),
    )
    made = SimpleNamespace(code=code, foreseen=foreseen)
    made.with_ways = lambda ways: SimpleNamespace(code=code, ways=ways)
    return made


COST = StageCost(10, 110, 0, 0, 0, 0, 0, 10, forward_seconds=1.0, nograd_seconds=1.0, backward_seconds=2.0)
SECONDS: Any = SimpleNamespace(seconds_of={"one": 5.0, "other": 7.0}.__getitem__)


@pytest.mark.parametrize(
    ("codes", "expected"), [("one one one", {"one"}), ("one other", set()), ("one one other", {"one"})]
)
def test_ways_are_compiled_that_a_plan_would_use_in_the_time_of_the_whole_model(codes: str, expected: set[str]) -> None:
    stages = [surveyed(code) for code in codes.split()]
    names = tuple(map(str, range(len(stages))))
    costs, nothing = (COST,) * len(stages), (0,) * len(stages)
    found: Any = SimpleNamespace(measurement=Measurement(names, costs, nothing, 10, LossCost(0.0, 0, 0)))
    assert may_have_ways(stages, SECONDS) == bool(expected)
    ways = {made.code: made.ways for made in with_ways(found, stages, SECONDS) if made not in stages}
    # Of the others, one saves too little to be told from noise, and one is slower than running again.
    assert ways == dict.fromkeys(expected, (HALF,))
