"""Which partition is taken, where several fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.utils import fresh_cache

from rotor_py.partition import choice, partitioner
from rotor_py.partition.choice import Candidate
from rotor_py.partition.partitioner import BudgetPartitioner
from tests.partition.compiled_steps import Loss

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def test_of_two_programs_that_take_as_long_that_of_pytorch_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor makes better code of it; both have the very operators here."""
    ours: list[Candidate] = []
    both: list[Candidate] = []
    honest = choice.candidates

    def seen(*given: Any, **options: Any) -> list[Candidate]:
        with monkeypatch.context() as patch:
            patch.setattr(choice, "programs_by_budgets", lambda *_: [])
            ours[:] = honest(*given, **options)
            patch.setattr(choice, "programs_by_budgets", lambda *_: [each.program for each in ours])
            both[:] = honest(*given, **options)
        return both

    monkeypatch.setattr(partitioner, "candidates", seen)
    torch._dynamo.reset()
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))]
    chooser = BudgetPartitioner(1, fused=True, estimated=True)
    run = torch.compile(Loss(nn.Sequential(*layers)), options={"custom_partitioner_fn": chooser})
    with fresh_cache(), pytest.raises(Exception, match="needs at least"):
        run(torch.randn(64, 32))
    assert len(ours) > 1
    assert {id(each.program) for each in both} == {id(each.program) for each in ours}
    for mine, theirs in zip(ours, both, strict=True):
        assert theirs.weight.peak == mine.weight.peak
        assert theirs.weight.seconds == pytest.approx(mine.weight.seconds / choice._OURS_LONGER)
