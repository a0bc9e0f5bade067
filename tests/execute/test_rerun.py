"""Stages that are run again by the engine's own nodes, stored whole or in part."""

from __future__ import annotations

import gc
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rotor_profiling import measured_peak
from rotor_profiling.backends import memory_meter
from rotor_py import Checkpointable
from rotor_py.execute.instructions import read_sequence
from rotor_py.execute.regions import regions, run
from rotor_py.measure import stage_measurer
from rotor_py.stage.compression import FormKeeper, Packed
from rotor_py.stage.runner import StageRunner
from rotor_solver import ForwardCheck, ForwardEnable, ForwardNograd, Sequence
from tests.capture.test_partial_saving import Attention, Gated, NewGelu, captured, loss
from tests.execute.sequences import persistent_sequence
from tests.fields import raises

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def any_way_may_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that was no faster than another, in whose place it could stand, when both were timed."""
    monkeypatch.setattr(stage_measurer, "worth_choosing", lambda whole, ways: tuple(ways))


def in_part(sequence: Sequence, planned: Checkpointable) -> Sequence:
    """The sequence, with every stage that is run again stored in its last way."""
    assert planned.chain is not None
    last = [len(stage.options) - 1 for stage in planned.chain.stages]
    assert all(last)
    again = {each.stage for each in sequence if isinstance(each, ForwardCheck | ForwardNograd)}
    return Sequence(
        [
            ForwardEnable(each.stage, last[each.stage])
            if isinstance(each, ForwardEnable) and each.stage in again
            else each
            for each in sequence
        ]
    )


def by_regions(planned: Checkpointable, sequence: Sequence, batch: torch.Tensor) -> torch.Tensor:
    assert planned.inspection_values is not None
    stages = zip(planned.names, planned.functions, planned.inspection_values.way_names, strict=True)
    runners = [StageRunner(stage, name, ways=ways, keepers=[FormKeeper(Packed())]) for name, stage, ways in stages]
    options = read_sequence(len(runners), sequence).options
    (output,) = run(runners, regions(sequence), (batch,), options)
    return output


def numbers(planned: Checkpointable, output: torch.Tensor) -> list[torch.Tensor]:
    planned.zero_grad()
    loss(output).backward()
    return [*(p.grad for p in planned.parameters() if p.grad is not None), output.detach(), torch.get_rng_state()]


def layers() -> list[nn.Module]:
    return [NewGelu(), Gated(), Attention(), NewGelu()]


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
def test_stages_in_regions_are_stored_in_part_with_the_same_bits(autocast: bool) -> None:
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        planned, batch = captured(*layers())
        torch.manual_seed(3)
        expected = numbers(planned, planned.model(batch))
        for seed in range(8):  # of these, most have regions, and regions in these
            sequence = in_part(persistent_sequence(len(planned.functions), random.Random(seed)), planned)
            torch.manual_seed(3)
            found = numbers(planned, by_regions(planned, sequence, batch))
            assert all(map(torch.equal, found, expected)), sequence


def test_a_region_with_stages_in_part_takes_what_the_plan_says() -> None:
    planned, batch = captured(*layers())
    assert planned.budget is not None
    last = len(planned.functions) - 1
    assert last == 3
    plain = Sequence.parse("CF_0, Fn_1, Fn_2, Fe_3, L, B_3, Fe_0, Fe_1, Fe_2, B_2, B_1, B_0")
    predicted, measured = [], []
    for sequence in (plain, in_part(plain, planned)):
        planned.zero_grad()
        step = lambda: loss(by_regions(planned, sequence, batch)).backward()  # noqa: B023, E731  # called at once
        measured.append(measured_peak(step, [*planned.parameters(), batch], CPU))
        predicted.append(planned.budget.peak_bytes(sequence) - planned.budget.fixed.optimizer)
    assert predicted[1] < 0.9 * predicted[0]
    assert measured[1] < 0.9 * measured[0]
    for found, expected in zip(measured, predicted, strict=True):
        assert 0.95 * expected <= found <= expected


def test_a_retained_graph_runs_stages_again_and_holds_nothing_meanwhile() -> None:
    planned, batch = captured(*layers())
    sequence = in_part(Sequence.parse("CF_0, Fn_1, Fn_2, Fe_3, L, B_3, CF_0, Fe_1, Fe_2, B_2, B_1, Fe_0, B_0"), planned)
    value = loss(by_regions(planned, sequence, batch))
    parameters = list(planned.parameters())
    with memory_meter(CPU) as meter:
        first = torch.autograd.grad(value, parameters, retain_graph=True)
        first_bytes = sum(each.nbytes for each in first)
        gc.collect()
        meter.mark("retained")
        second = torch.autograd.grad(value, parameters)
    assert all(map(torch.equal, first, second))
    assert meter.phases[""].kept == first_bytes


def test_gradients_of_gradients_go_through_stages_that_are_run_again_whole() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))).double()
    batch = torch.randn(4, 8, dtype=torch.double, requires_grad=True)
    items = regions(Sequence.parse("CF_0, Fn_1, Fe_2, L, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"))

    def penalized(output: torch.Tensor) -> list[torch.Tensor | None]:
        model.zero_grad()
        (gradient,) = torch.autograd.grad(output.square().sum(), batch, create_graph=True)
        gradient.square().sum().backward()
        return [each.grad for each in model.parameters()]

    expected = penalized(model(batch))
    found = penalized(run([StageRunner(layer, "layer") for layer in model], items, batch))
    for one, other in zip(expected, found, strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


class Changing(nn.Linear):
    """Saves other tensors every time."""

    runs = 0

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        Changing.runs += 1  # of the class: what a layer keeps in itself is found again as it was
        made = super().forward(value)
        return made[self.runs :].exp() if self.runs < 3 else made


def test_a_stage_that_does_something_else_the_second_time_is_refused() -> None:
    runner = StageRunner(Changing(4, 4), "changing")
    output = run([runner], regions(Sequence.parse("CF_0, L, Fe_0, B_0")), torch.randn(8, 4))
    with raises(RuntimeError, "rerun_differs"):
        output.sum().backward()


@pytest.mark.parametrize("inplace", [False, True])
def test_noise_that_is_saved_before_it_is_drawn_is_drawn_again(inplace: bool) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.RReLU(inplace=inplace)), nn.Linear(8, 8)).train()
    batch, items = torch.randn(4, 8), regions(Sequence.parse("CF_0, Fe_1, L, B_1, Fe_0, B_0"))

    def gradients(forward: Any) -> list[torch.Tensor | None]:
        torch.manual_seed(1)
        model.zero_grad()
        forward(batch).square().sum().backward()
        return [each.grad for each in model.parameters()]

    expected = gradients(model)
    found = gradients(lambda value: run([StageRunner(layer, "layer") for layer in model], items, value))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


class Inside(nn.Module):
    """A layer that is run again by PyTorch's own means."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), reentrant

    def forward(self, value: torch.Tensor) -> Any:
        return checkpoint(self.layer, value.sin(), use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_use_checkpoints_inside_are_run_again_as_well(reentrant: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Inside(reentrant) for _ in range(3)))
    batch = torch.randn(4, 8, requires_grad=True)
    parameters = list(model.parameters())
    sequence = Sequence.parse("CF_0, Fn_1, Fe_2, L, B_2, CF_0, Fe_1, B_1, Fe_0, B_0")

    def gradients(output: torch.Tensor) -> list[torch.Tensor | None]:
        model.zero_grad()
        output.square().sum().backward()
        return [each.grad for each in parameters]

    expected = gradients(model(batch))
    runners = [StageRunner(layer, "layer") for layer in model]
    found = gradients(run(runners, regions(sequence), batch))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
