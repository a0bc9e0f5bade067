"""Other ways to store a compiled stage: which are compiled, that they have the same bits, and that bytes are known."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.capture.variants import with_ways
from rotor_py.compile.compiled_stage import same_bits
from rotor_solver import Backward, ForwardCheck, ForwardEnable, Loss, Sequence, store_all
from tests.compile.network import Net, batch, measured, network, peak, results, same


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


@pytest.mark.slow
def test_ways_keep_less_with_the_same_bits_and_the_predicted_peak_also_from_a_file(
    budgeted: Checkpointable, tmp_path: Path
) -> None:
    measurement, sequence = budgeted._planner.in_use.measurement, in_ways(budgeted)
    for cost, ways in zip(measurement.stages, measurement.ways_by_stage, strict=True):
        saved = [cost.saved_bytes, *(way.cost.saved_bytes for way in ways)]
        assert saved == sorted(set(saved), reverse=True)
    assert budgeted.chain is not None
    expected = results(budgeted, store_all(budgeted.chain), batch())
    assert same(results(budgeted, sequence, batch()), expected)
    budgeted.save_plan(tmp_path / "plan.json")
    torch.manual_seed(0)
    again = Checkpointable(Net(6), plan=tmp_path / "plan.json", granularity=6)
    again.model.load_state_dict(budgeted.model.state_dict())
    assert same(results(again, sequence, batch()), expected)
    assert 0.98 * peak(budgeted) <= measured(budgeted, batch()) <= peak(budgeted)


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


def test_ways_are_compiled_in_the_time_that_equal_stages_have_saved() -> None:
    stages: list[Any] = [
        SimpleNamespace(code=code, with_ways=lambda ways, code=code: SimpleNamespace(code=code, ways=ways))
        for code in ["one"] * 4 + ["other"] * 3
    ]
    compiler: Any = SimpleNamespace(seconds_of={"one": 5.0, "other": 10.0})
    made: list[Any] = with_ways(stages, compiler)
    assert {each.code: len(each.ways) for each in made} == {"one": 3, "other": 2}
