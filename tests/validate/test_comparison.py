"""Every strategy at one limit, asked for from Python."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch
from torch import nn

from rotor_py import Checkpointable, compare
from rotor_py.validate.comparison import EVERY, at_limit, leanest, named, strategies
from rotor_solver import InfeasibleError, Periodic, StoreAll, simulate, store_all
from tests.checkpointable.steps import between
from tests.fields import raises
from tests.solver.strategies import unit_chain


def blocks(number: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(number)])


def test_a_plan_is_compared_with_every_strategy_at_its_limit() -> None:
    model = blocks(6)
    network = Checkpointable(model, torch.randn(64, 64), loss=torch.sum)
    network.compute_sequence(between(network, 0.5))
    report = network.report()
    told: list[tuple[int, int, str]] = []
    plan, *others = compare(network, progress=lambda *state: told.append(state))
    assert (plan.strategy, plan.sequence, plan.fits) == ("optimal", report.sequence, True)
    assert (plan.peak_bytes, plan.step_seconds, plan.overhead) == (
        report.peak_bytes,
        report.step_seconds,
        report.overhead,
    )
    assert {"level 1", "sqrt", "revolve", "store-all", "recompute-all"} < {each.strategy for each in others}
    for each in others:
        assert each.fits == (each.peak_bytes <= report.mem_limit)
        assert each.verified is None
    fitting = [each.step_seconds for each in others if each.fits]
    assert fitting == sorted(fitting)
    assert [(done, total) for done, total, _ in told] == [(done, len(others)) for done in range(len(others))]


def test_without_a_limit_there_is_nothing_to_compare_at() -> None:
    network = Checkpointable(blocks(2), every_n_layers=0)
    network.measure(torch.randn(8, 64))
    with raises(ValueError, "no_limit"):
        compare(network)


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


def test_only_levels_that_the_model_has_are_listed() -> None:
    block = [nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)]
    flat = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    deep = nn.Sequential(*[nn.Sequential(*block) for _ in range(3)])
    found = strategies(flat, ["0", "1", "2"], 500)
    assert [name for name in found if name.startswith("level")] == ["level 1"]
    stages = [f"{outer}.{inner}.{leaf}" for outer in range(3) for inner in range(3) for leaf in range(2)]
    found = strategies(deep, stages, 500)
    assert [name for name in found if name.startswith("level")] == ["level 1", "level 2"]


def test_the_distance_is_read_off_the_sequence() -> None:
    chain = unit_chain(12)
    for distance in range(1, 13):
        sequence = Periodic(every=distance).solve(chain, 10**9)
        assert named(EVERY, sequence) == ("every layer" if distance == 1 else f"every {distance} layers")
    assert named("sqrt", sequence) == "sqrt"
