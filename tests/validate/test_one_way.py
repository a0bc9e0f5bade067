"""What each way to keep what stages save is worth by itself: rows of a comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, compare
from rotor_py.measure.measurement import Way
from rotor_py.validate.comparison import OneWay, one_way_each
from rotor_solver import ForwardEnable, InfeasibleError, simulate
from rotor_solver.moving import Link
from tests.checkpointable.steps import between


class Block(nn.Module):
    """It saves a mask that can be packed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + nn.functional.dropout(self.layer(value).tanh(), 0.5)


def test_every_way_alone_is_compared_with_all_of_them() -> None:
    network = Checkpointable(
        nn.Sequential(*[Block() for _ in range(6)]), torch.randn(256, 64), loss=torch.sum, keep="bf16"
    )
    network.compute_sequence(between(network, 0.3))
    best, *others = compare(network)
    found = {row.strategy: row for row in others if row.strategy.startswith("optimal")}
    assert {"optimal, whole", "optimal, packed", "optimal, in bf16"} <= set(found)
    names = network.inspection_values.way_names
    for strategy, row in found.items():
        kept = {
            names[each.stage][each.option - 1]
            for each in row.sequence
            if isinstance(each, ForwardEnable) and each.option
        }
        assert kept <= {strategy.removeprefix("optimal, ")}
        if row.fits:
            # Both are as near to the best as the solver comes.
            assert best.step_seconds <= row.step_seconds * 1.01


def test_a_row_is_found_among_its_options_alone_and_has_their_numbers_in_the_chain() -> None:
    network = Checkpointable(nn.Sequential(*[Block() for _ in range(4)]), torch.randn(64, 64), loss=torch.sum)
    measured = network.inspection_values
    ways = tuple((Way("slow", replace(cost, forward_seconds=9.0)), Way("packed", cost)) for cost in measured.stages)
    assert one_way_each(replace(measured, ways=((),) * len(ways)), 500) == {}
    measured = replace(measured, ways=ways)
    chain = measured.chain(fresh_gradients=True)
    algorithms = one_way_each(measured, 500)
    assert [*algorithms] == ["optimal, whole", "optimal, in part", "optimal, packed"]
    packed = algorithms["optimal, packed"]
    assert isinstance(packed, OneWay)
    assert packed.options == ((0, 2),) * 4
    for algorithm in algorithms.values():
        with pytest.raises(InfeasibleError) as refused:
            algorithm.solve(chain, 0)
        least = refused.value.min_bytes
        assert simulate(chain, algorithm.solve(chain, least)).peak <= least


def test_what_moves_is_compared_as_well(tmp_path: Path) -> None:
    network = Checkpointable(
        nn.Sequential(*[Block() for _ in range(4)]), torch.randn(512, 64), loss=torch.sum, offload=f"file:{tmp_path}"
    )
    assert network.budget is not None
    network.compute_sequence(between(network, 0.6))
    measured, chain = network.inspection_values, network.budget.chain
    moving = one_way_each(measured, 500, Link(1e12, 1e12))["optimal, elsewhere"]
    with pytest.raises(InfeasibleError) as refused:
        moving.solve(chain, 0)
    sequence = moving.solve(chain, refused.value.min_bytes)
    assert sequence.moves is not None
    assert sequence.moves.stages
    assert "optimal, elsewhere" in {row.strategy for row in compare(network)}
