"""Stages whose saved tensors are kept in another form: a step leaves the same bits, whatever the sequence."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from rotor_py.execute.instructions import read_sequence
from rotor_py.execute.tape import Tape
from rotor_py.stage import compression
from rotor_py.stage.compression import FormKeeper, Packed
from rotor_py.stage.runner import StageRunner
from rotor_solver import ForwardEnable, Sequence
from tests.execute.sequences import any_sequence, everything_again, persistent_sequence
from tests.execute.training import assert_same, cut_of, steps
from tests.execute.zoo import ZOO


@dataclass(frozen=True)
class Copy:
    """A tensor as it was: what is written to its own memory afterwards does not show."""

    values: torch.Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def tensor(self) -> torch.Tensor:
        return self.values.clone()


class PackedOrCopied:
    """A form that keeps everything, and overwrites nothing: packed where that is possible."""

    name, exact = "kept", True

    def __init__(self) -> None:
        self.packed = self.copied = 0

    def keep(self, memory: torch.Tensor) -> Any:
        packed = Packed().keep(memory)
        self.packed += packed is not None
        self.copied += packed is None
        return Copy(memory.clone()) if packed is None else packed


def in_form(model: nn.Module, sample: Any, sequence: Sequence, form: Any) -> Callable[[Any], Any]:
    found = cut_of(model, sample)
    operations = tuple(replace(each, option=1) if isinstance(each, ForwardEnable) else each for each in sequence)

    def forward(value: Any) -> Any:
        for _, layer in found.prefix:
            value = layer(value)
        runners = [StageRunner(function, name, keepers=(FormKeeper(form),)) for name, function in found.stages]
        return Tape(runners, read_sequence(len(runners), Sequence(operations))).forward(value)

    return forward


@pytest.mark.parametrize("name", ZOO)
def test_a_step_leaves_the_bits_of_plain_training(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compression, "LEAST_BYTES", 0)
    case, form = ZOO[name], PackedOrCopied()
    torch.manual_seed(0)
    model, sample = case.model(), case.sample()
    plain = copy.deepcopy(model)
    expected = steps(plain, plain, sample, case.autocast)
    length = len(cut_of(model, sample).stages)
    for sequence in (
        everything_again(length),
        *(kind(length, random.Random(seed)) for kind in (persistent_sequence, any_sequence) for seed in range(2)),
    ):
        kept = copy.deepcopy(model)
        with case.autocast or nullcontext():
            forward = in_form(kept, sample, sequence, form)
        assert_same(steps(kept, forward, sample, case.autocast), expected)
    assert form.copied or name.partition(",")[0] in ("views", "shared")
    assert form.packed or "dropout" not in name
