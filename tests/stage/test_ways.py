"""Ways to store a stage: any number of them, known by name from measuring to the file of a plan and back."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from rotor_profiling import StageCost
from rotor_py import Checkpointable
from rotor_py.measure.measurement import Way, costliest
from rotor_py.measure.stage_ways import worth_choosing
from rotor_py.plan.saved_plan import PlanCosts
from rotor_py.plan.settings import Settings
from rotor_py.stage.protocol import Keeper, Run, Trial, base_of, both, own_of, parted
from rotor_solver import Chain, ForwardEnable, Option, Sequence, Stage
from tests.capture.steps import adamw, compare
from tests.capture.test_partial_saving import WIDTH, Gated, captured
from tests.checkpointable.steps import square
from tests.fields import raises


class Left(Gated):
    """A layer that these ways do not suit."""


class Written(Keeper, Trial):
    """Writes what is saved as text of Python, which counters of torch's memory do not see: all of it, or half."""

    pays = True

    def __init__(self, name: str, *, most: bool) -> None:
        self.name = name
        self._most = most

    def suits(self, function: Callable[..., Any]) -> bool:
        return not isinstance(function, Left)

    def trial(self, function: Callable[..., Any]) -> Written:
        return self

    def keeping(self, run: Run, function: Callable[..., Any]) -> Run:
        def kept(value: Any) -> Any:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _read):
                return run(value)

        return kept

    def _pack(self, tensor: torch.Tensor) -> Any:
        whole = isinstance(tensor, nn.Parameter) or tensor.numel() < 16 or tensor._base is not None
        if whole or (not self._most and tensor.shape[-1] > WIDTH):
            return tensor
        return bytes(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()), tensor.dtype, tensor.shape


def _read(saved: Any) -> torch.Tensor:
    if isinstance(saved, torch.Tensor):
        return saved
    content, dtype, shape = saved
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape).clone()


@pytest.fixture
def _two_keepers(monkeypatch: pytest.MonkeyPatch) -> None:
    keepers = Written("half written", most=False), Written("written", most=True)
    monkeypatch.setattr(Settings, "_keepers", lambda self: keepers)
    # Whether one of them is beaten depends on a clock.
    monkeypatch.setattr("rotor_py.measure.stage_measurer.worth_choosing", lambda whole, ways: tuple(ways))


def in_turn(planned: Checkpointable) -> Sequence:
    """Every stage stored once, by its last way, its first, and so on."""
    solved = planned.compute_sequence(10**9)
    stages = planned.budget.chain.stages
    last = [max(0, len(stage.options) - 1 - number % 2) for number, stage in enumerate(stages)]
    by = lambda each: replace(each, option=last[each.stage]) if isinstance(each, ForwardEnable) else each  # noqa: E731
    return Sequence(map(by, solved))


@pytest.mark.usefixtures("_two_keepers")
def test_a_chain_of_layers_is_stored_by_ways_that_need_nothing_of_it_inside_the_predicted_peak() -> None:
    model, batch = nn.Sequential(Gated(), Gated(), Left(), Gated()).train(), torch.randn(256, WIDTH)
    planned = Checkpointable(model, loss=square, optimizer=adamw(model), fresh_grads=True)
    planned.measure(batch)
    assert not planned.captured
    names = planned.inspection_values.way_names
    assert {name for each in names for name in each} <= {"half written", "written"}
    assert [names[at][-1:] for at in range(4)] == [("written",), ("written",), (), ("written",)]
    planned.sequence = in_turn(planned)
    predicted = planned.budget.peak_bytes(planned.sequence)
    measured = compare(planned, copy.deepcopy(model), {"input": batch}, square)
    assert 0.95 * predicted <= measured <= predicted


@pytest.mark.usefixtures("_two_keepers")
def test_a_plan_with_several_ways_comes_back_from_its_file_and_is_run_by_name(tmp_path, monkeypatch) -> None:
    planned, batch = captured(Gated(), Gated(), Gated())
    names = planned.inspection_values.way_names
    assert max(map(len, names)) >= 2
    assert {"in part", "written"} <= {name for each in names for name in each}
    planned.sequence = in_turn(planned)
    assert any(f"^{option}" in str(planned.sequence) for option in (2, 3, 4))
    assert tuple(Sequence.parse(str(planned.sequence))) == tuple(planned.sequence)
    assert "stored written: " in str(planned.report())
    planned.save_plan(tmp_path / "plan.json")

    def loaded(**options: Any) -> Checkpointable:
        other, path = copy.deepcopy(planned.model).train(), tmp_path / "plan.json"
        options |= {"loss": square, "optimizer": adamw(other), "fresh_grads": True, "granularity": 3}
        return Checkpointable(other, plan=path, **options)

    # The keepers come in another order.
    turned = Written("written", most=True), Written("half written", most=False)
    monkeypatch.setattr(Settings, "_keepers", lambda self: turned)
    found = loaded()
    compare(found, copy.deepcopy(planned.model), {"x": batch}, square)
    assert found.sequence == planned.sequence
    assert found.inspection_values == planned.inspection_values
    monkeypatch.setattr(Settings, "_keepers", lambda self: ())
    with raises(ValueError, "unknown_way"):
        loaded()(x=batch)
    # A way in a file has a name and a cost.
    data = json.loads(json.dumps(PlanCosts(planned.inspection_values, planned.budget).as_data()))
    whole = next(way for ways in data["ways"] for way in ways)
    odd: list[Any] = [{**whole, "name": 3}, {**whole, "name": ""}, {"name": "in part"}, [], None]
    for way, field in zip(odd, ("name", "ways", "cost", "ways", "ways"), strict=True):
        data["ways"] = [[way]] * len(names)
        with raises(ValueError, "bad_field", name=field):
            PlanCosts.from_data(data, planned.inspection_values.names, fresh_gradients=True)


def cost(seconds: float, saved: int, scratch: int = 0) -> StageCost:
    nbytes = 8, saved, scratch, 0, scratch, scratch, 0, 0
    return StageCost(*nbytes, forward_seconds=seconds, nograd_seconds=seconds, backward_seconds=0.0)


def test_ways_that_are_no_better_in_anything_are_dropped() -> None:
    good, least = Way("good", cost(1.2, 50)), Way("least", cost(2.0, 10))
    roomy = Way("roomy", cost(1.3, 50, scratch=-8))
    no_better = Way("no less", cost(1.0, 100)), Way("slow", cost(1.3, 50)), Way("slower", cost(2.1, 10))
    assert list(worth_choosing(cost(1.0, 100), [good, *no_better, roomy, least])) == [good, roomy, least]


def test_of_ways_that_processes_have_measured_those_are_left_that_mean_the_same_in_all() -> None:
    def chain(*names: str) -> Chain:
        options = (Option(1.0, 1.0, 9), *(Option(1.0, 2.0, 5, name=name) for name in names))
        return Chain((Stage(4, options),), input_bytes=4)

    left = costliest([chain("in part", "written", "x"), chain("in part", "y")])
    assert [option.name for option in left.stages[0].options] == ["", "in part"]
    assert len(costliest([chain("a"), chain("b")]).stages[0].options) == 1


PART, DEARER, KEEPER = "in part", "in part, products again", "packed"
WAYS = (PART, DEARER, KEEPER, both(PART, KEEPER), both(DEARER, KEEPER))


def test_a_way_with_keepers_is_named_after_the_last_and_based_on_the_way_without_it() -> None:
    assert [base_of(each, WAYS) for each in WAYS] == [None, None, None, PART, DEARER]
    way, keepers = both(both(PART, KEEPER), "elsewhere"), (KEEPER, "elsewhere")
    assert base_of(way, (*WAYS, "elsewhere")) == both(PART, KEEPER)
    assert parted(way, keepers) == (both(PART, KEEPER), "elsewhere")
    assert parted(both(*keepers), keepers) == keepers
    assert [own_of(each, keepers) for each in (way, both(*keepers), DEARER)] == [PART, None, DEARER]
