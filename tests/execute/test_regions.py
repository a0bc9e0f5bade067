"""A persistent sequence as nested regions does what the sequence says."""

from __future__ import annotations

import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py.execute.regions import Region, regions, run
from rotor_py.stage.runner import StageRunner
from rotor_solver import Backward, Loss, Sequence
from tests.execute.sequences import any_sequence, persistent_sequence
from tests.execute.training import cut_of, steps
from tests.fields import raises


def test_checkpoints_become_regions() -> None:
    sequence = Sequence.parse("Fe_0, CF_1, Fn_2, Fe_3, L, B_3, CF_1, Fe_2, B_2, Fe_1, B_1, B_0")
    assert regions(sequence) == (0, Region((Region((1,)), 2)), 3)


def test_a_sequence_that_drops_checkpoints_early_is_refused() -> None:
    with raises(ValueError, "not_nested"):
        regions(Sequence.parse("CF_0, CF_1, Fn_2, L, Fn_1, Fe_2, B_2, CF_0, Fe_1, B_1, Fe_0, B_0"))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", [persistent_sequence, any_sequence])
def test_every_sequence_is_followed_or_refused(kind: Callable[[int, random.Random], Sequence], seed: int) -> None:
    sequence = kind(5, random.Random(seed))
    model, runs = nn.Sequential(*[nn.Linear(3, 3) for _ in range(5)]), Counter[int]()
    for index, layer in enumerate(model):
        layer.register_forward_pre_hook(lambda *_, index=index: runs.update([index]))
    try:
        items = regions(sequence)
    except ValueError:
        assert kind is any_sequence
        return
    run([StageRunner(layer, "layer") for layer in model], items, torch.randn(2, 3)).sum().backward()
    assert runs == Counter(each.stage for each in sequence if not isinstance(each, Backward | Loss))


def test_the_output_of_a_region_is_freed_once_the_next_stage_has_read_it() -> None:
    outputs: list[weakref.ref[torch.Tensor]] = []
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.ReLU())  # a ReLU saves its output alone
    model[1].register_forward_pre_hook(lambda _, args: outputs.append(weakref.ref(args[0])))
    there: list[bool] = []
    model[2].register_forward_pre_hook(lambda *_: there.append(outputs[0]() is not None))
    run([StageRunner(layer, "layer") for layer in model], (Region((0,)), 1, 2), torch.randn(2, 3))
    assert there == [False]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("autocast", [False, True])
def test_numbers_are_those_of_plain_training_bit_for_bit(seed: int, autocast: bool) -> None:
    model = nn.Sequential(
        *(
            layer
            for _ in range(3)
            for layer in (nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.2))
        )
    )
    sample = torch.randn(16, 8)
    found = cut_of(model, sample)
    sequence = persistent_sequence(len(found.stages), random.Random(seed))
    items = regions(sequence)

    def nested(value: Any) -> Any:
        return run([StageRunner(function, name) for name, function in found.stages], items, value)

    start = {name: value.clone() for name, value in model.state_dict().items()}
    region = torch.autocast("cpu", torch.bfloat16, enabled=autocast)
    expected = steps(model, model, sample, region)
    model.load_state_dict(start)
    for (name, one), (_, other) in zip(expected, steps(model, nested, sample, region), strict=True):
        assert torch.equal(one, other), name
