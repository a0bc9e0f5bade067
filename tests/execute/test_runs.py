"""A stage runs as often as the sequence says, and never more."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch import nn

from rotor_py import CheckpointOptim
from rotor_solver import Backward, Loss, Sequence
from tests.execute.sequences import any_sequence, persistent_sequence


def counted(length: int) -> tuple[nn.Sequential, Counter[int]]:
    runs: Counter[int] = Counter()
    model = nn.Sequential(*[nn.Linear(3, 3) for _ in range(length)])
    for index, layer in enumerate(model):
        layer.register_forward_hook(lambda *_, index=index: runs.update([index]))
    return model, runs


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("kind", [persistent_sequence, any_sequence])
def test_forwards_are_those_of_the_sequence(kind, seed: int) -> None:
    model, runs = counted(6)
    sequence: Sequence = kind(6, random.Random(seed))
    CheckpointOptim.apply(list(model), sequence, "abcdef", True, torch.randn(2, 3)).sum().backward()
    before = len([each for each in sequence if isinstance(each, Backward | Loss)])
    expected = Counter(each.stage for each in sequence if not isinstance(each, Backward | Loss))
    assert before == 7
    assert runs == expected
