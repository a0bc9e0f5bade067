"""Every strategy at one limit, what each way to keep is worth by itself, and the least limits of a model."""

import copy
import inspect
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rotor_py import Checkpointable, InfeasibleError, Sweep, compare, least_limit, sweep, verify
from rotor_py.measure.measurement import Way
from rotor_py.validate.comparison import EVERY, OneWay, at_limit, leanest, named, one_way_each, strategies
from rotor_solver import ForwardEnable, Periodic, Persistent, StoreAll, simulate, store_all
from rotor_solver.offload import Link
from tests.checkpointable.steps import Residual, between, planned_at
from tests.fields import raises
from tests.solver import plans
from tests.solver.strategies import unit_chain


def blocks(number: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(number)])


def test_a_plan_is_compared_with_every_strategy_at_its_limit_if_it_has_one() -> None:
    network = planned_at(0.5, blocks(6), torch.randn(64, 64), loss=torch.sum)
    report = network.report()
    told: list[tuple[int, int, str]] = []
    plan, *others = compare(network, progress=lambda *state: told.append(state))
    assert (plan.strategy, plan.sequence, plan.fits) == ("optimal", report.sequence, True)
    for name in ("peak_bytes", "step_seconds", "overhead"):
        assert getattr(plan, name) == getattr(report, name)
    assert {"level 1", "sqrt", "revolve", "store-all", "recompute-all"} < {each.strategy for each in others}
    for each in others:
        assert each.fits == (each.peak_bytes <= report.mem_limit)
        assert each.verified is None
    fitting = [each.step_seconds for each in others if each.fits]
    assert fitting == sorted(fitting)
    assert [(done, total) for done, total, _ in told] == [(done, len(others)) for done in range(len(others))]
    with raises(ValueError, "no_limit"):
        compare(Checkpointable(blocks(2), torch.randn(8, 64), every_n_layers=0))


def test_what_fits_is_planned_to_fit_and_what_does_not_is_as_lean_as_it_can_be() -> None:
    model = blocks(5)
    network = Checkpointable(model, torch.randn(32, 64), loss=torch.sum)
    budget = replace(network.budget, snapshot_bytes=10_000)
    for name, algorithm in strategies(model, network.names, 500).items():
        lean = budget.peak_bytes(leanest(budget, algorithm))
        assert budget.peak_bytes(at_limit(budget, algorithm, lean - 1)) == lean, name
        for limit in (lean, lean + 3000, lean + 9_999, lean + 30_000, 10**9):
            assert budget.peak_bytes(at_limit(budget, algorithm, limit)) <= limit, name
        for limit in range(lean, lean + 40_000, 8192):
            found, room = at_limit(budget, algorithm, limit), budget.chain_limit(limit)
            with suppress(InfeasibleError):
                slower = simulate(budget.chain, algorithm.solve(budget.chain, room)).makespan
                assert simulate(budget.chain, found).makespan <= slower, name
    stored = budget.peak_bytes(store_all(budget.chain))
    for algorithm in (StoreAll(), Periodic()):  # what computes nothing twice needs no snapshot
        assert at_limit(budget, algorithm, stored) == store_all(budget.chain)


def test_only_levels_that_the_model_has_are_listed_and_the_distance_is_read_off_the_sequence() -> None:
    flat, deep = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), nn.Sequential(*[blocks(3) for _ in range(3)])
    stages = [f"{outer}.{inner}.{leaf}" for outer in range(3) for inner in range(3) for leaf in range(2)]
    for model, names, levels in ((flat, ["0", "1", "2"], ["level 1"]), (deep, stages, ["level 1", "level 2"])):
        assert [name for name in strategies(model, names, 500) if name.startswith("level")] == levels
    chain = unit_chain(12)
    for distance in range(1, 13):
        sequence = Periodic(every=distance).solve(chain, 10**9)
        assert named(EVERY, sequence) == ("every layer" if distance == 1 else f"every {distance} layers")
    assert named("sqrt", sequence) == "sqrt"


class Block(nn.Linear):
    """It saves a mask that can be packed."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + nn.functional.dropout(super().forward(value).tanh(), 0.5)


def network_of(number: int, batch: torch.Tensor, **options: object) -> Checkpointable:
    return Checkpointable(nn.Sequential(*[Block(64, 64) for _ in range(number)]), batch, loss=torch.sum, **options)


def test_every_way_alone_is_compared_with_all_of_them() -> None:
    network = network_of(6, torch.randn(256, 64), keep="bf16")
    network.compute_sequence(between(network, 0.3))
    best, *others = compare(network)
    found = {row.strategy: row for row in others if row.strategy.startswith("optimal")}
    assert {"optimal, whole", "optimal, packed", "optimal, in bf16"} <= set(found)
    names = network.inspection_values.way_names
    for strategy, row in found.items():
        kept = [each for each in row.sequence if isinstance(each, ForwardEnable) and each.option]
        assert {names[each.stage][each.option - 1] for each in kept} <= {strategy.removeprefix("optimal, ")}
        assert not row.fits or best.step_seconds <= row.step_seconds * 1.01  # both as near as the solver comes


def test_a_row_is_found_among_its_options_alone_and_has_their_numbers_in_the_chain() -> None:
    network = network_of(4, torch.randn(64, 64))
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
        plans.least_limit(algorithm, chain)


def test_what_moves_is_compared_as_well(tmp_path: Path) -> None:
    network = network_of(4, torch.randn(512, 64), offload=f"file:{tmp_path}")
    network.compute_sequence(between(network, 0.6))
    measured, chain = network.inspection_values, network.budget.chain
    moving = one_way_each(measured, 500, Link(1e12, 1e12))["optimal, elsewhere"]
    with pytest.raises(InfeasibleError) as refused:
        moving.solve(chain, 0)
    sequence = moving.solve(chain, refused.value.min_bytes)
    assert sequence.moves.stages
    assert "optimal, elsewhere" in {row.strategy for row in compare(network)}


BATCH = torch.randn(64, 64)


def test_every_point_of_the_curve_is_a_plan_for_its_limit_and_none_fits_below_the_least() -> None:
    model = Checkpointable(blocks(6), BATCH, loss=torch.sum)
    found, least = sweep(model), least_limit(blocks(6), BATCH, loss=torch.sum)
    assert isinstance(found, Sweep)
    assert found.strategies
    assert least == found.points[0].mem_limit <= found.points[-1].mem_limit == found.store_all_bytes
    for point in found.points:
        assert model.budget.peak_bytes(model.compute_sequence(point.mem_limit)) <= point.mem_limit
    with pytest.raises(InfeasibleError) as error:
        model.compute_sequence(least - 1)
    assert error.value.min_bytes == least
    for overhead in (0.0, 0.1, 0.5, 10.0):
        limit = least_limit(model, max_overhead=overhead)
        assert limit == min(point.mem_limit for point in found.points if point.overhead <= 1 + overhead)


def test_limits_of_plans_that_move_are_lower_and_each_is_that_of_a_plan(tmp_path, monkeypatch) -> None:
    blocks = nn.Sequential(*(Residual(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)))
    batch = torch.randn(256, 64)
    alone = Checkpointable(copy.deepcopy(blocks), batch, loss=torch.sum, fresh_grads=True)
    rate = 1.5 * alone.report().store_all_bytes / alone.report().store_all_seconds  # so that to move costs something
    monkeypatch.setattr("rotor_py.offload.open_tier.measure_bandwidth", lambda *_: rate)
    moving = Checkpointable(blocks, batch, loss=torch.sum, fresh_grads=True, offload=f"file:{tmp_path}")
    limit, report = least_limit(moving, max_overhead=0.1), moving.report()
    assert limit < least_limit(alone, max_overhead=0.1)
    # The least, as closely as is looked: clearly below it, plans are slower.
    below = limit - (report.store_all_bytes - report.budget.least_bytes()) // 50
    assert below > report.budget.least_bytes()
    seconds = moving.budget.makespan(moving.budget.solve(below, Persistent()))
    assert seconds > 1.1 * report.store_all_seconds
    found = sweep(moving)
    assert any(point.sequence.moves is not None for point in found.points)
    for point in found.points:
        assert moving.budget.peak_bytes(point.sequence) == point.mem_limit
        assert moving.budget.makespan(point.sequence) == pytest.approx(point.step_seconds)


def test_all_questions_take_a_model_and_a_sample_or_what_has_been_measured() -> None:
    for ask in (sweep, least_limit, compare, verify):
        assert [*inspect.signature(ask).parameters][:2] == ["model", "sample"]
    model, options = blocks(6), {"mem_limit": "1GB", "loss": torch.sum, "fresh_grads": True}
    before = copy.deepcopy(model.state_dict())
    planned = Checkpointable(copy.deepcopy(model), BATCH, **options)
    assert least_limit(model, BATCH, **options) == least_limit(planned)
    assert sweep(model, BATCH, **options).store_all_bytes == sweep(planned).store_all_bytes
    for found in (compare(model, BATCH, **options), compare(planned)):
        assert {each.strategy: each.peak_bytes for each in found}["store-all"] == planned.report().store_all_bytes
    (found,), (same,) = verify(model, BATCH, **options), verify(planned, BATCH, loss=torch.sum)
    assert found.measured_peak_bytes == same.measured_peak_bytes <= planned.report().peak_bytes
    assert found.max_grad_difference == same.max_grad_difference == 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    for ask in (sweep, least_limit, compare):
        with raises(ValueError, "no_sample"):
            ask(model)
        with raises(ValueError, "sample_given_twice"):
            ask(planned, BATCH)
    with raises(ValueError, "sample_given_twice"):
        verify(planned, BATCH, mem_limit="1GB")
