"""Whatever the sequence, and in whatever form tensors are kept, a step leaves the same bits as plain training."""

import copy
import random
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rotor_py.execute.instructions import read_sequence
from rotor_py.execute.tape import Tape
from rotor_py.stage import compression
from rotor_py.stage.compression import FormKeeper, Packed
from rotor_py.stage.runner import StageRunner
from rotor_solver import ForwardEnable, Sequence
from tests.execute.sequences import any_sequence, everything_again, persistent_sequence
from tests.execute.training import assert_same, cut_of, replayed, steps
from tests.execute.zoo import ZOO


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(1, 4), marks=pytest.mark.slow)], ids=["one", "many"])
@pytest.mark.parametrize("name", ZOO)
def test_a_step_by_any_sequence_leaves_the_bits_of_plain_training(name: str, seeds: range) -> None:
    case = ZOO[name]
    torch.manual_seed(0)
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
    torch.manual_seed(0)
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
