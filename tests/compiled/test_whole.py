"""A graph that is compiled as a whole: inside the limit, with the numbers of the same graph without a budget."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from rotor_profiling import measured_peak, storage_bytes
from rotor_py import Checkpointable, verify
from rotor_py.capture.whole_graph import Tried, next_shown
from rotor_py.compile import partitioner
from rotor_py.compile.joint_graph import JointGraph
from rotor_py.compile.operator_costs import Cost
from rotor_py.measure.measurement import Measurement
from rotor_py.plan.measuring import CompileBudget
from rotor_solver import store_all
from tests.compiled.network import Net, Wide, batch, gradients, loss, results, same
from tests.compiled.test_choice import Compilations
from tests.fields import logged

ROWS = 256


@pytest.fixture(autouse=True, scope="module")
def whatever_was_measured() -> Iterator[None]:
    """A network as small as this one may be faster plain, and which of its partitions is faster is a matter of luck."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rotor_py.capture.whole_graph.slower", lambda *_: False)
        patch.setattr("rotor_py.compile.peak.fused_costs", alike)
        patch.setattr("rotor_py.compile.candidates._CLOSE", -1.0)
        patch.setattr("rotor_py.capture.whole_graph._WORTH_MORE_WAITING", 1.0)
        yield


def alike(joint: JointGraph, costs: dict[fx.Node, Cost]) -> dict[fx.Node, Cost]:
    """Every operator takes as long as any other, so it is faster to run fewer of them again."""
    return {node: replace(cost, seconds=1e-6, keeping=0.0) for node, cost in costs.items()}


def whole(
    limit: int | str,
    loss: Callable[[torch.Tensor], torch.Tensor] = loss,
    make: Callable[[int], nn.Module] = Net,
    blocks: int = 2,
) -> Checkpointable:
    """A network that runs compiled as a whole, whatever was measured, or else stage by stage."""
    torch.manual_seed(0)
    found = Checkpointable(make(blocks), batch(ROWS), limit, compile=True, loss=loss, fresh_grads=True, granularity=2)
    plan = found._planner.in_use
    plan.turn_to(plan.ways[0])
    assert found.chain is not None
    found.sequence = store_all(found.chain)
    return found


def peak(found: Checkpointable) -> int:
    assert found.budget is not None
    assert found.sequence is not None
    return found.budget.peak_bytes(found.sequence)


@pytest.fixture(scope="module")
def free() -> Checkpointable:
    """Without a budget that matters."""
    return whole("1GB")


@pytest.fixture(scope="module")
def tight(free: Checkpointable) -> Checkpointable:
    """Inside the limit of which a tenth less is left for activations."""
    assert free.budget is not None
    fixed = free.budget.fixed.total
    return whole(fixed + (peak(free) - fixed) * 9 // 10)


def stepped(found: Checkpointable, **options: Any) -> list[torch.Tensor]:
    assert found.sequence is not None
    return results(found, found.sequence, batch(ROWS), **options)


def test_the_graph_is_one_compiled_stage(free: Checkpointable, tight: Checkpointable) -> None:
    for found in (free, tight):
        assert len(found.names) == 1
        assert found.compiled == found.names
        assert len(found._planner.in_use.ways) == 2  # and plain: its stages are not compiled beside it


def measured(found: Checkpointable, loss: Callable[[torch.Tensor], torch.Tensor] = loss) -> int:
    value = batch(ROWS)
    found.watch = False

    def step() -> None:
        output = found(value)
        loss(output).backward()

    before = copy.deepcopy(found.model.state_dict())
    found.model.zero_grad()
    step()
    found.model.zero_grad()
    present = [*found.model.parameters(), *found.model.buffers(), value]
    try:
        return measured_peak(step, present, torch.device("cpu"))
    finally:
        found.model.load_state_dict(before)


def test_its_peak_is_inside_the_limit_and_as_predicted(free: Checkpointable, tight: Checkpointable) -> None:
    assert isinstance(tight.mem_limit, int)
    assert peak(tight) <= tight.mem_limit < peak(free)
    for found in (free, tight):
        assert 0.98 * peak(found) <= measured(found) <= peak(found)


def test_it_leaves_room_for_a_loss_that_takes_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def large(output: torch.Tensor) -> torch.Tensor:
        return output.repeat(1, 8).exp().mean()

    free = whole("1GB", large, Wide, 1)
    assert free.budget is not None
    assert peak(free) > peak_without_loss(free)
    compilations = Compilations(monkeypatch)
    tight = whole(peak(free) - batch(ROWS).nbytes, large, Wide, 1)
    assert len(tight.names) == 1
    assert compilations.count == 1  # it was known before, not found out
    assert isinstance(tight.mem_limit, int)
    assert 0.98 * peak(tight) <= measured(tight, large) <= peak(tight) <= tight.mem_limit

    tight.save_plan(tmp_path / "plan.json")
    again = Checkpointable(Wide(1), plan=tmp_path / "plan.json", granularity=2)
    assert measured(again, large) <= tight.mem_limit


def peak_without_loss(found: Checkpointable) -> int:
    assert found.budget is not None
    budget = found.budget
    return replace(budget, chain=replace(budget.chain, loss_temp=0)).peak_bytes(store_all(budget.chain))


def test_a_budget_changes_no_bit(free: Checkpointable, tight: Checkpointable) -> None:
    expected = stepped(free)
    assert same(stepped(tight), expected)
    counts = [each for each in expected if each.dtype == torch.int64]
    assert counts
    assert all(each == 1 for each in counts)


@pytest.mark.slow
def test_a_retained_graph_goes_backward_twice(free: Checkpointable, tight: Checkpointable) -> None:
    assert same(stepped(tight, passes=2), stepped(free, passes=2))


@pytest.mark.slow
def test_two_forwards_in_flight(free: Checkpointable, tight: Checkpointable) -> None:
    def both(found: Checkpointable) -> list[torch.Tensor]:
        before = copy.deepcopy(found.model.state_dict())
        found.model.zero_grad()
        torch.manual_seed(3)
        first, second = found(batch(ROWS)), found(batch(ROWS).neg())
        (loss(first) + 2 * loss(second)).backward()
        made = gradients(found.model)
        found.model.load_state_dict(before)
        return made

    assert same(both(tight), both(free))


@pytest.mark.slow
def test_another_shape_is_compiled_when_it_comes(free: Checkpointable, tight: Checkpointable) -> None:
    made = [results(found, found.sequence, batch(48)) for found in (tight, free) if found.sequence is not None]
    assert same(*made)


@pytest.mark.slow
def test_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        free = whole("1GB")
        assert free.budget is not None
        fixed = free.budget.fixed.total
        tight = whole(fixed + (peak(free) - fixed) * 7 // 8)
        assert len(tight.names) == 1
        assert peak(tight) < peak(free)
        assert same(stepped(tight), stepped(free))


@pytest.mark.slow
def test_verifying_compares_with_the_graph_without_a_budget(tight: Checkpointable) -> None:
    (found,) = verify(tight, batch(ROWS), loss=loss, fresh_grads=True)
    assert found.max_grad_difference == 0
    assert found.plain_peak_bytes is not None
    assert found.plain_peak_bytes > found.measured_peak_bytes  # what it was compared with saves more


@pytest.mark.slow
def test_what_takes_more_than_foreseen_is_compiled_once_more_with_less(
    monkeypatch: pytest.MonkeyPatch, free: Checkpointable
) -> None:
    compilations = Compilations(monkeypatch)
    honest = CompileBudget.peak
    # A compiler that takes a seventh more than what its graphs show, at the second look as at the first.
    monkeypatch.setattr(CompileBudget, "peak", lambda room, found: honest(room, found) * 23 // 20)
    limit = peak(free) * 11 // 10
    found = whole(limit)
    assert len(found.names) == 1
    assert compilations.count == 2
    assert peak(found) * 23 // 20 <= limit


@pytest.mark.slow
@pytest.mark.parametrize("needs", [0.85, 0.99])
def test_what_takes_less_than_foreseen_is_compiled_once_more_with_more(
    monkeypatch: pytest.MonkeyPatch, free: Checkpointable, needs: float
) -> None:
    """A compiler that fuses much, so that more can be saved than the graph shows, and one that fuses nothing."""
    foreseen: list[int] = []

    def peak_of(room: CompileBudget, found: Measurement) -> int:
        if len(found.stages) == 1:
            foreseen.append(partitioners[-1].peak)
            return room.fixed + int(needs * (foreseen[-1] - given))
        return room.limit + 1  # plain, nothing fits

    partitioners: list[Any] = []
    honest = CompileBudget.partitioner

    def partitioner(room: CompileBudget, limit: int) -> Any:
        partitioners.append(honest(room, limit))
        return partitioners[-1]

    assert free.budget is not None
    given = storage_bytes([*free.model.parameters(), *free.model.buffers(), batch(ROWS)])
    monkeypatch.setattr(CompileBudget, "peak", peak_of)
    monkeypatch.setattr(CompileBudget, "partitioner", partitioner)
    whole(peak(free) * 19 // 20)
    assert len(foreseen) == (2 if needs == 0.85 else 1)
    assert foreseen == sorted(set(foreseen))


def test_what_the_next_partition_may_show() -> None:
    room = 100
    assert next_shown([Tried(shown=100, taken=125)], room) == 80
    assert next_shown([Tried(100, 101)], room) == 99
    assert next_shown([Tried(96, 80)], room) == 115  # three quarters of the 20 % that are left
    between = [Tried(90, 80), Tried(110, 104)]
    assert next_shown(between, room) == next_shown(between[::-1], room) == 106
    assert next_shown([Tried(100, 99), Tried(101, 1000)], room) == 100


def test_where_partitions_take_too_much_one_after_the_other_steps_grow() -> None:
    first, second, third = Tried(100, 104), Tried(96, 102), Tried(92, 103)
    assert next_shown([first], 100) == 96
    assert next_shown([first, second], 100) == 96 - 2 * (96 - 94)
    worst = 100 * third.shown // third.taken  # for what it showed, it took the most
    assert next_shown([first, second, third], 100) == 92 - 3 * (92 - worst)


@pytest.mark.slow
def test_where_the_least_partition_takes_too_much_none_is_compiled_twice(
    monkeypatch: pytest.MonkeyPatch, free: Checkpointable
) -> None:
    shown: list[int] = []
    honest, partitioner = CompileBudget.peak, CompileBudget.partitioner
    given: list[Any] = []

    def partitioner_of(room: CompileBudget, limit: int) -> Any:
        given.append(partitioner(room, limit))
        return given[-1]

    def peak_of(room: CompileBudget, found: Measurement) -> int:
        if len(found.stages) > 1:
            return honest(room, found)
        shown.append(given[-1].peak)
        return room.limit + room.limit // 100

    monkeypatch.setattr(CompileBudget, "partitioner", partitioner_of)
    monkeypatch.setattr(CompileBudget, "peak", peak_of)
    found = whole(peak(free) * 19 // 20)
    assert len(found.names) > 1
    assert len(shown) > 1
    assert len(set(shown)) == len(shown)


@pytest.mark.slow
def test_as_long_as_no_partition_fits_others_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a U-Net's were: what is foreseen to fit takes a little too much, three times."""
    limit = peak(whole("1GB", blocks=6)) * 19 // 20
    compiled: list[int] = []
    honest = CompileBudget.peak

    def peak_of(room: CompileBudget, found: Measurement) -> int:
        if len(found.stages) > 1:
            return honest(room, found)
        compiled.append(honest(room, found))
        return max(room.limit + room.limit // 100, compiled[-1]) if len(compiled) <= 3 else compiled[-1]

    monkeypatch.setattr(CompileBudget, "peak", peak_of)
    found = whole(limit, blocks=6)
    assert len(found.names) == 1
    assert compiled[:4] == sorted(compiled[:4], reverse=True)
    assert peak(found) <= limit


@pytest.mark.slow
def test_a_limit_between_the_peaks_of_two_partitions_has_a_third_compiled(
    monkeypatch: pytest.MonkeyPatch, free: Checkpointable
) -> None:
    assert free.budget is not None
    compilations = Compilations(monkeypatch)
    # The first partition takes far less than the room, the second one a little more, and the third one fits.
    shares = [0.6, 1.04, 0.97]
    saved: list[int] = []

    def peak_of(room: CompileBudget, found: Measurement) -> int:
        if len(found.stages) > 1:
            return room.limit + 1  # plain, nothing fits
        saved.append(found.stages[0].saved_bytes)
        return room.fixed + int(shares[len(saved) - 1] * (room.limit - room.fixed))

    fixed = free.budget.fixed.total
    tight = fixed + (peak(free) - fixed) * 8 // 10
    made = CompileBudget
    monkeypatch.setattr("rotor_py.plan.measuring.CompileBudget", lambda budget, _, fresh: made(budget, tight, fresh))
    monkeypatch.setattr(CompileBudget, "peak", peak_of)
    found = whole(peak(free))
    assert compilations.count == 3
    assert saved[0] < saved[2] < saved[1]
    assert found._planner.in_use.ways[0].measurement.stages[0].saved_bytes == saved[2]


@pytest.mark.slow
@pytest.mark.parametrize("taken", [0.999, 1.01])
def test_a_faster_one_is_tried_that_shows_a_little_more_than_the_limit(
    monkeypatch: pytest.MonkeyPatch, free: Checkpointable, taken: float
) -> None:
    monkeypatch.setattr("rotor_py.capture.whole_graph._WORTH_MORE_WAITING", 0.001)
    monkeypatch.setattr("rotor_py.capture.whole_graph._SHOWN_TOO_MUCH", 0.15)
    compilations, saved, shares = Compilations(monkeypatch), list[int](), [0.99, taken, 2.0]

    def peak_of(room: CompileBudget, found: Measurement) -> int:
        if len(found.stages) > 1:
            return room.limit + 1  # plain, nothing fits
        saved.append(found.stages[0].saved_bytes)
        return room.fixed + int(shares[len(saved) - 1] * (room.limit - room.fixed))

    monkeypatch.setattr(CompileBudget, "peak", peak_of)
    found = whole(peak(free) * 19 // 20)
    assert compilations.count >= 2
    assert saved[0] < saved[1]
    kept = found._planner.in_use.ways[0].measurement.stages[0].saved_bytes
    assert kept == saved[1 if taken < 1 else 0]


@pytest.mark.slow
@pytest.mark.parametrize("wins", [True, False])
def test_of_two_makers_whose_partitions_seem_as_fast_both_are_compiled_and_timed(
    monkeypatch: pytest.MonkeyPatch, free: Checkpointable, tmp_path: Path, wins: bool
) -> None:
    monkeypatch.setattr("rotor_py.compile.candidates._CLOSE", 100.0)
    monkeypatch.setattr("rotor_py.capture.whole_graph.slower", lambda *given: len(given) == 3 and wins)
    compilations = Compilations(monkeypatch)
    assert free.budget is not None
    limit = free.budget.fixed.total + (peak(free) - free.budget.fixed.total) * 19 // 20
    found = whole(limit)
    assert compilations.count == 2
    assert peak(found) <= limit < peak(free)
    assert same(stepped(found), stepped(free))
    found.save_plan(tmp_path / "plan.json")
    data = json.loads((tmp_path / "plan.json").read_text())
    assert data["compiled"]["by_torch"] is (True if wins else None)
    again = Checkpointable(Net(2), plan=tmp_path / "plan.json", granularity=2)
    makers: list[bool | None] = []
    honest = partitioner.whole_partitioner
    monkeypatch.setattr(partitioner, "whole_partitioner", lambda *given: (makers.append(given[2]), honest(*given))[1])
    assert measured(again) <= limit
    assert makers == [True if wins else None]  # ours was the first


@pytest.mark.slow
def test_an_optimizer_that_comes_late_has_it_compiled_for_the_room_that_is_left(free: Checkpointable) -> None:
    """Adam's state takes as much again as all parameters, twice."""
    torch.manual_seed(0)
    limit = peak(free) * 11 // 10
    found = Checkpointable(Net(2), mem_limit=limit, compile=True, loss=loss, fresh_grads=True, granularity=2)
    optimizer = torch.optim.Adam(found.parameters())
    saved = []
    for _ in range(3):
        optimizer.zero_grad()
        loss(found(batch(ROWS))).backward()
        plan = found._planner.in_use
        assert len(plan.ways[0].cut.stages) == 1
        saved.append(plan.ways[0].measurement.stages[0].saved_bytes)
        optimizer.step()
    budget = plan.budget_of(plan.ways[0])
    assert budget.peak_bytes(store_all(budget.chain)) <= limit
    assert saved[0] > saved[1] == saved[2]


@pytest.mark.slow
def test_where_no_partition_fits_the_stages_are_compiled(
    monkeypatch: pytest.MonkeyPatch, free: Checkpointable, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(CompileBudget, "fixed", property(lambda room: room.limit - 1))
    found = whole(peak(free))
    assert len(found.names) == 2
    assert found.compiled
    assert not logged(caplog, "not_compiled")


def test_where_it_fails_the_stages_are_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    Compilations(monkeypatch, failing=range(1))
    found = whole("1GB")
    assert len(found.names) == 2
    assert found.compiled
    assert logged(caplog, "not_compiled", name="the graph as a whole")


def test_what_does_not_fit_after_all_is_not_compiled_in_every_step(
    free: Checkpointable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert free.budget is not None
    fixed = free.budget.fixed.total
    limit = fixed + (peak(free) - fixed) * 9 // 10
    roomy = CompileBudget.partitioner
    monkeypatch.setattr(CompileBudget, "partitioner", lambda room, _: roomy(room, 10**12))
    monkeypatch.setattr(CompileBudget, "peak", lambda *_: 0)  # as if all beside the graph were overlooked
    torch.manual_seed(0)
    found = Checkpointable(Net(2), mem_limit=limit, compile=True, loss=loss, fresh_grads=True, granularity=2)
    for _ in range(3):
        found.zero_grad()
        loss(found(batch(ROWS))).backward()
    assert len(found.names) > 1
    assert not logged(caplog, "planning_again")
