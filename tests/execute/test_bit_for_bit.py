"""Whatever the sequence, and in whatever form tensors are kept, a step leaves the same bits as plain training."""

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rotor_py import Checkpointable
from rotor_py.execute.instructions import read_sequence
from rotor_py.execute.tape import Tape
from rotor_py.stage import compression
from rotor_py.stage.compression import FormKeeper, Packed
from rotor_py.stage.replayed_routing import streams_of
from rotor_py.stage.runner import StageRunner
from rotor_solver import ForwardEnable, Sequence
from tests.checkpointable.steps import Residual, between, same_gradients
from tests.execute.sequences import any_sequence, everything_again, persistent_sequence
from tests.execute.training import assert_same, cut_of, replayed, steps
from tests.execute.zoo import ZOO


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 4), marks=pytest.mark.slow)], ids=["one", "many"])
@pytest.mark.parametrize("name", ZOO)
def test_a_step_by_any_sequence_leaves_the_bits_of_plain_training(name: str, seeds: range) -> None:
    case = ZOO[name]
    model, sample = case.model(), case.sample()
    plain = copy.deepcopy(model)
    expected = steps(plain, plain, sample, case.autocast)
    kinds = (any_sequence,) if len(seeds) == 1 else (persistent_sequence, any_sequence)
    drawn = [partial(kind, rng=random.Random(seed)) for kind in kinds for seed in seeds]
    for make in (everything_again, *drawn):
        trained = copy.deepcopy(model)
        with case.autocast or nullcontext():
            found = cut_of(trained, sample)
        sequence = make(len(found.stages))
        assert_same(steps(trained, replayed(found, sequence), sample, case.autocast), expected)


class PackedOrCopied:
    """A form that keeps everything: packed where that is possible."""

    name, exact, packed, copied = "kept", True, 0, 0

    def keep(self, memory: torch.Tensor) -> Any:
        packed = Packed().keep(memory)
        self.packed += packed is not None
        self.copied += packed is None
        copy = memory.clone()  # what is written to the memory afterwards does not show
        return packed or SimpleNamespace(nbytes=copy.nbytes, tensor=copy.clone)


@pytest.mark.parametrize("name", [each for each in ZOO if "input" not in each])
def test_so_does_one_whose_stages_keep_tensors_in_another_form(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "LEAST_BYTES", 0)
    case, form = ZOO[name], PackedOrCopied()
    model, sample = case.model(), case.sample()
    plain = copy.deepcopy(model)
    with case.autocast or nullcontext():
        found = cut_of(model, sample)
    drawn = any_sequence(len(found.stages), random.Random(0))
    sequence = Sequence(replace(each, option=1) if isinstance(each, ForwardEnable) else each for each in drawn)

    def forward(value: Any) -> Any:
        for _, layer in found.prefix:
            value = layer(value)
        runners = [StageRunner(function, name, keepers=(FormKeeper(form),)) for name, function in found.stages]
        return Tape(runners, read_sequence(len(runners), sequence)).forward(value)

    assert_same(steps(model, forward, sample, case.autocast), steps(plain, plain, sample, case.autocast))
    assert form.copied or name.partition(",")[0] in ("views", "shared")
    assert form.packed or "dropout" not in name


WIDTH = 32


class Block(Residual):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))


class Skipped(Block):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value if random.random() < 0.5 else super().forward(value)


class Scaled(Block):
    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return float(np.random.rand()) * super().forward(value)


class Stream(torch.Generator):
    def __deepcopy__(self, memory: dict[int, Any]) -> torch.Generator:
        return Stream().set_state(self.get_state())


class Noisy(Block):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Stream().manual_seed(1)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return super().forward(value * torch.rand(value.shape, generator=self.noise))


def states(model: nn.Module) -> list[Any]:
    return [stream.state() for stream in streams_of(model)]


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)


@pytest.mark.parametrize("make", [Skipped, Scaled, Noisy])
def test_numbers_and_streams_are_those_of_plain_training(make: Callable[[], nn.Module]) -> None:
    seed(0)
    model, value = nn.Sequential(*(make() for _ in range(4))), torch.randn(64, WIDTH)
    plain, trained = copy.deepcopy(model), copy.deepcopy(model)
    before = states(trained)
    planned = Checkpointable(trained, value, "1GB", fresh_grads=True, cache=False, watch=False)
    assert states(trained) == before, "measuring draws nothing"
    for step in range(4):
        planned.compute_sequence(between(planned, step * 0.1))
        after = []
        for network, own in ((plain, plain), (planned, trained)):
            network.zero_grad()
            seed(step)
            output = network(value)
            if output.requires_grad:  # not if all are skipped
                output.square().mean().backward()
            after.append(states(own))
        assert after[0] == after[1]
        assert same_gradients(trained, plain)
